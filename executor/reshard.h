/* The executor's C API: open → bind → prepare → run … → close. No exceptions cross it; every failure is a status and a
 * text. */
#ifndef RESHARD_H
#define RESHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opaque. Owned by the caller from reshard_open to reshard_close. One thread at a time may call with it, any thread;
   several executors may be used by several threads at once. What a function returns a pointer to is the executor's and
   lives until close, reshard_error's text until the next call. What the caller passes is read during the call alone,
   but for memory that is bound, and hooks with their `user`: these are kept until close. */
typedef struct reshard_executor reshard_executor;

typedef enum {
  RESHARD_OK = 0,
  RESHARD_INVALID = 1,  /* wrong argument or call order; nothing changed */
  RESHARD_BAD_PLAN = 2, /* the plan file is absent, damaged, newer, or does not mean anything */
  RESHARD_BAD_BINDING =
      3, /* a buffer is missing, unknown, of the wrong size, out of the device's reach, or overlaps another */
  RESHARD_FAILED = 4, /* a failure at run time: of prepare, or of a run, whose targets are torn */
  RESHARD_TIMEOUT = 5 /* the deadline passed; likewise */
} reshard_status;

typedef enum {
  RESHARD_EMPTY = 0,    /* no run has completed */
  RESHARD_COMPLETE = 1, /* the targets hold what the last run moved */
  RESHARD_TORN = 2      /* a run failed part way: do not use the targets until a later run completes */
} reshard_state;

/* How bytes reach a process. */
typedef enum {
  RESHARD_LOCAL = 0,         /* copied within the process */
  RESHARD_SHARED_MEMORY = 1, /* copied out of the memory of another process of its host */
  RESHARD_MESSAGES = 2,      /* received as messages, over MPI or NCCL */
  /* The part of RESHARD_MESSAGES from processes of its host, because their memory cannot be mapped. 0 with
     no_local_shortcut. */
  RESHARD_MESSAGES_INSIDE_HOST = 3
} reshard_method;

typedef struct {
  const char *transport; /* "threads": all ranks in this process; "mpi", and "nccl" with device "cuda": one in each;
                            NULL: "threads". With "mpi" a process calls one executor at a time, unless it has called
                            MPI_Init_thread for MPI_THREAD_MULTIPLE itself; a process that has not called MPI_Init has
                            it called by the first open, and MPI_Finalize by the last close, after which no open works.
                            After RESHARD_FAILED or RESHARD_TIMEOUT of a run over "mpi", MPI may write what was on its
                            way to bound memory until the process ends: do not use that memory for anything else */
  const char *device; /* "cpu"; "cuda", with transport "threads" or "nccl": all bound memory is a GPU's; NULL: "cpu" */
  uint32_t threads;   /* workers of transport "threads"; 0: all cores */
  double
      join_seconds; /* the deadline of open and of prepare, which wait for the other processes, and of close; 0: none */
  int no_local_shortcut; /* not 0: messages even where memory of a peer could be reached directly; with "nccl" a rank's
                            to itself as well */
  void *communicator; /* of "nccl": the caller's ncclComm_t, of as many ranks as the plan; stays the caller's, but a run
                         that fails aborts it */
  const char *unique_id_file; /* of "nccl" without a communicator: a file that all processes see and that is not there
                            before the launch, by which they find each other; NULL: as RESHARD_NCCL_ID_FILE says, else
                            by NCCL_COMM_ID (host:port of rank 0), else under mpirun by MPI */
} reshard_options;

/* Opens the plan for the given world ranks (all of them in this process; ranks NULL: every rank of the plan, or with
   transport "mpi" or "nccl" this process's own, which "nccl" takes from the communicator or the launcher's
   environment). With "mpi" all processes open or none: where one cannot read its plan, all have its status. On failure
   *executor is still set where memory allows, so that reshard_error can tell why; close it. */
reshard_status reshard_open(const char *path, const uint32_t *ranks, size_t rank_count, const reshard_options *options,
                            reshard_executor **executor);

/* The world ranks of this process, *count of them; valid until close. */
const uint32_t *reshard_ranks(const reshard_executor *executor, size_t *count);

/* Binds a param's memory. endpoint: as in the job, 0 is the source. place: the world rank, or for a storage endpoint
   the file number (0 for a checkpoint). The memory stays the caller's and must live, unmoved, until close. bytes must
   be exact. */
reshard_status reshard_bind(reshard_executor *executor, uint32_t endpoint, uint32_t rank, const char *param,
                            void *pointer, uint64_t bytes);

/* What the engine does after each run to params that the plan marks `refresh: NAME` (derived weights, caches). Called
   by reshard_run once for each name and each rank that has such params, when all bytes of all ranks of this process are
   in place. Not 0: the run fails. With device "cuda" it is called by reshard_prepare instead, once, while the refit is
   captured: what it enqueues on reshard_stream becomes part of every run, after the last byte. It may allocate; it must
   not wait for the stream. Not 0: prepare fails. */
typedef int (*reshard_hook)(void *user, const char *name, uint32_t rank);

/* The cudaStream_t that a run's work is on; NULL with device "cpu". */
void *reshard_stream(const reshard_executor *executor);

/* Sets the hook of a name; before prepare, which asks for one of each name of its ranks. */
reshard_status reshard_set_hook(reshard_executor *executor, const char *name, reshard_hook hook, void *user);

/* An instance of a param that the plan marks `transform: NAME`, as hooks see it. All that it points to lives until
 * close, and is the same in every run. */
typedef struct {
  const char *transform; /* NAME */
  const char *name;      /* the instance's, as of a param that is bound */
  uint32_t endpoint;     /* 0 is the source */
  uint32_t rank;
  const char *dtype;    /* bf16 fp16 fp32 …, as it moves */
  const int64_t *shape; /* elements; row-major without gaps */
  size_t dimensions;
  void *memory; /* the executor's, of the device; on a target written anew by each run */
  uint64_t bytes;
  void *stream; /* reshard_stream; NULL with device "cpu" */
} reshard_transformed;

/* The caller's own conversion between its storage and such params, which nobody binds. Each hook is called by
   reshard_run once for each instance on each rank of this process, in the order of ranks, then of the plan; not 0: the
   run fails. With device "cuda" hooks are called by reshard_prepare instead, as a reshard_hook is: what they enqueue on
   `stream` becomes part of every run, at its place. */
typedef struct {
  int (*prepare_send)(void *user,
                      const reshard_transformed *param); /* of a source: fills `memory`, before anything is sent */
  int (*prepare_receive)(void *user,
                         const reshard_transformed *param); /* of a target: before anything is received; may be NULL */
  int (*finalize)(void *user,
                  const reshard_transformed
                      *param); /* of a target: takes `memory` over, when all bytes are there; before `refresh` */
  void *user;
} reshard_transform;

/* Sets the transform of a name, which is copied; before prepare, which asks for prepare_send of what the sources of its
   ranks name, and for finalize of what their targets name. Where prepare_send or prepare_receive fails on one rank, the
   others wait for it: until their deadline, or until it runs again. */
reshard_status reshard_set_transform(reshard_executor *executor, const char *name, const reshard_transform *transform);

/* Checks that all that is moved is bound and nothing overlaps, agrees with the other processes, allocates what the run
   needs. After it, bindings are fixed. After RESHARD_INVALID and RESHARD_BAD_BINDING it may be called again, with what
   was missing; after RESHARD_FAILED and RESHARD_TIMEOUT it may not. Of several processes all are prepared or none; they
   wait for one that still lacks a binding, until their deadline. */
reshard_status reshard_prepare(reshard_executor *executor);

/* Moves every byte, and returns when it is there. Allocates nothing. timeout_seconds <= 0: no deadline. With device
   "cuda" what writes the sources and reads the targets on other streams must be done before. */
reshard_status reshard_run(reshard_executor *executor, double timeout_seconds);

/* With device "cuda": enqueues a refit on a cudaStream_t of the caller's and returns. It begins when what is on the
   stream is done; what is put there later sees the new weights. Where the stream is being captured, the refit becomes
   part of the caller's graph, and moves weights whenever that is launched. Every rank must do so as often as the
   others; refits of one executor must not overlap. Nobody waits: there is no deadline, state and version stay as they
   are, and the executor must live until the last of it is done. */
reshard_status reshard_enqueue(reshard_executor *executor, void *stream);

/* All-reduce min: *result is the least `value` of all processes. Every process of the run must call it. Use it, for
   example, to learn whether all processes succeeded. May be called at any time after open; the deadline is
   join_seconds. */
reshard_status reshard_all_reduce_min(reshard_executor *executor, int64_t value, int64_t *result);

reshard_state reshard_target_state(const reshard_executor *executor);
/* How many runs have completed. */
uint64_t reshard_version(const reshard_executor *executor);
/* Why the last call failed, "" where it did not; lives until the next call. */
const char *reshard_error(const reshard_executor *executor);
/* Bytes that a run moves, padding included. */
uint64_t reshard_bytes(const reshard_executor *executor);
/* Of these, the bytes that reach this process's ranks by one method; known after prepare. */
uint64_t reshard_bytes_by(const reshard_executor *executor, reshard_method method);
void reshard_close(reshard_executor *executor);

#ifdef __cplusplus
}
#endif
#endif
