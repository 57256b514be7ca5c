// SPDX-License-Identifier: Apache-2.0
// The locks by which errors of transport mpi name ranks that have ended.

#ifdef RESHARD_MPI

#include "executor/backends/liveness_lock.h"

#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <sys/wait.h>
#include <unistd.h>

namespace reshard {

/// A process that has ended is named, also while a process that it has forked lives on.
TEST(LivenessLock, AForkedProcessDoesNotKeepIt) {
  const tests::TemporaryFolder folder;
  setenv("PMIX_SERVER_TMPDIR", folder.path().c_str(), 1);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  const auto start = [](const char *localRank, const char *rank) {
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", localRank, 1);
    setenv("OMPI_COMM_WORLD_RANK", rank, 1);
    return LivenessLock();
  };
  int said[2], stop[2]; // pipes: the other process is ready; it shall end
  ASSERT_TRUE(pipe(said) == 0 && pipe(stop) == 0);
  const pid_t other = fork();
  if (other == 0) {
    const LivenessLock lock = start("0", "4");
    pid_t child = fork();
    if (child == 0)
      pause();
    char byte = 0;
    const bool ended = write(said[1], &child, sizeof child) == sizeof child && read(stop[0], &byte, 1) == 1;
    _exit(ended ? 0 : 1);
  }
  const LivenessLock mine = start("1", "5");
  pid_t child = 0;
  ASSERT_EQ(read(said[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  EXPECT_EQ(mine.missing(), "all ranks of this host have joined, but not all ranks of the job are ready");
  EXPECT_EQ(write(stop[1], "", 1), 1);
  int status = 0;
  EXPECT_EQ(waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(kill(child, 0), 0);
  EXPECT_EQ(mine.missing(), "rank 4 has ended");
  EXPECT_EQ(kill(child, SIGKILL), 0);
  for (const char *name :
       {"PMIX_SERVER_TMPDIR", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"})
    unsetenv(name);
  for (const int each : {said[0], said[1], stop[0], stop[1]})
    close(each);
}

} // namespace reshard

#endif
