// SPDX-License-Identifier: Apache-2.0
/* Preloaded into the processes of an MPI run: raises a signal at a chosen call of MPI. RESHARD_TRAP="FUNCTION COUNT
   SIGNAL RANK": on world rank RANK, before the COUNT-th call (from 0) of FUNCTION. For MPI_Init_thread and
   MPI_Finalize, COUNT 1 means after the call. SIGNAL 0: calls _exit(1), as Open MPI does if its start fails. One for
   each of several ranks: separated by commas. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void at(const char *function) {
  static char name[64];
  static int count = -1, number, rank = -1;
  if (count == -1) {
    const char *trap = getenv("RESHARD_TRAP"), *mine = getenv("OMPI_COMM_WORLD_RANK");
    for (; trap && mine && rank != atoi(mine); trap = strchr(trap, ',') ? strchr(trap, ',') + 1 : NULL)
      if (sscanf(trap, "%63s %d %d %d", name, &count, &number, &rank) != 4)
        break;
    if (!mine || rank != atoi(mine))
      count = -2;
  }
  if (count >= 0 && strcmp(function, name) == 0 && count-- == 0) {
    count = -2;
    if (number == 0)
      _exit(1);
    raise(number);
  }
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  at("MPI_Init_thread");
  const int code = PMPI_Init_thread(argc, argv, required, provided);
  at("MPI_Init_thread");
  return code;
}
int MPI_Finalize(void) {
  at("MPI_Finalize");
  const int code = PMPI_Finalize();
  at("MPI_Finalize");
  return code;
}
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *copy, MPI_Request *request) {
  at("MPI_Comm_idup");
  return PMPI_Comm_idup(comm, copy, request);
}
int MPI_Isend(const void *data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Request *request) {
  at("MPI_Isend");
  return PMPI_Isend(data, count, type, peer, tag, comm, request);
}
int MPI_Irecv(void *data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Request *request) {
  at("MPI_Irecv");
  return PMPI_Irecv(data, count, type, peer, tag, comm, request);
}
int MPI_Test(MPI_Request *request, int *flag, MPI_Status *status) {
  at("MPI_Test");
  return PMPI_Test(request, flag, status);
}
