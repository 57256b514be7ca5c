// SPDX-License-Identifier: Apache-2.0
// The environment of launchers.

#include "executor/rendezvous/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

using namespace reshard;

namespace {

class LaunchTest : public testing::Test {
public:
  LaunchTest() {
    for (const char *name : {"OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "TORCHELASTIC_RUN_ID",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "LOCAL_WORLD_SIZE",
                             "RESHARD_PORT",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_ID",
                             "SLURM_NNODES",
                             "SLURM_STEP_NUM_NODES",
                             "SLURM_JOB_NODELIST",
                             "SLURM_STEP_NODELIST",
                             "SLURM_LAUNCH_NODE_IPADDR",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "MPI_LOCALNRANKS",
                             "PMIX_NAMESPACE",
                             "OMPI_MCA_ess_base_jobid",
                             "OMPI_MCA_orte_hnp_uri"})
      unsetenv(name);
  }

  static void set(const std::vector<std::pair<const char *, const char *>> &variables) {
    for (const auto &[name, value] : variables)
      setenv(name, value, 1);
  }
  static std::string job() {
    const Result<LaunchedJob> found = findLaunchedJob();
    return found.ok() ? std::to_string(found->rank) + " of " + std::to_string(found->size) + " at " + found->url
                      : found.status().message();
  }
};

} // namespace

TEST_F(LaunchTest, TheInnermostLauncherCounts) {
  EXPECT_FALSE(findLaunch().rank);
  setenv("SLURM_PROCID", "0", 1);
  setenv("SLURM_NTASKS", "1", 1);
  EXPECT_EQ(findLaunch().rank, 0u);
  setenv("RANK", "5", 1); // torchrun under Slurm: Slurm's values are not used
  EXPECT_EQ(findLaunch().rank, 5u);
  EXPECT_FALSE(findLaunch().size);
  setenv("WORLD_SIZE", "8", 1);
  setenv("LOCAL_RANK", "1", 1);
  EXPECT_EQ(findLaunch().size, 8u);
  EXPECT_EQ(findLaunch().localRank, 1u);
  setenv("OMPI_COMM_WORLD_RANK", "twelve", 1);
  EXPECT_EQ(findLaunch().rank, 5u);
  setenv("OMPI_COMM_WORLD_RANK", "12", 1);
  EXPECT_EQ(findLaunch().rank, 12u);
}

TEST_F(LaunchTest, TorchrunUnderAnotherLauncher) {
  // As under `srun --mpi=pmi2 torchrun` and `mpirun torchrun`, one per host: PMI and Open MPI number the torchruns.
  for (const char *name : {"PMI_RANK", "OMPI_COMM_WORLD_RANK"})
    setenv(name, "1", 1);
  for (const char *name : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"})
    setenv(name, "2", 1);
  setenv("RANK", "11", 1);
  setenv("WORLD_SIZE", "16", 1);
  setenv("LOCAL_RANK", "3", 1);
  EXPECT_EQ(findLaunch().rank, 1u);
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  EXPECT_EQ(findLaunch().rank, 11u);
  EXPECT_EQ(findLaunch().size, 16u);
  EXPECT_EQ(findLaunch().localRank, 3u);
  unsetenv("RANK"); // torchrun's agent process has no RANK
  EXPECT_EQ(findLaunch().rank, 1u);
}

TEST_F(LaunchTest, TorchsConventionCountsBeforeMpi) {
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("RANK", "7", 1);
  EXPECT_EQ(findLaunch().rank, 1u);
  setenv("MASTER_ADDR", "a", 1);
  EXPECT_EQ(findLaunch().rank, 7u);
}

TEST_F(LaunchTest, JobsOfTorch) {
  set({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "trainer-0"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://trainer-0:29501");
  set({{"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://127.0.0.1:29501");
  set({{"LOCAL_WORLD_SIZE", "2"}, {"RESHARD_PORT", "1234"}, {"MASTER_ADDR", "fd00::1"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://[fd00::1]:1234");
}

TEST_F(LaunchTest, JobsOfSlurm) {
  set({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}});
  set({{"SLURM_NNODES", "2"}, {"SLURM_JOB_NODELIST", "gpu[003-006,9]-ib,login"}});
  EXPECT_THAT(job(), testing::MatchesRegex("3 of 4 at tcp://gpu003-ib:2[0-9]{4}"));
  const std::string first = job();
  set({{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(job(), first);
  set({{"SLURM_STEP_NODELIST", "gpu7"}, {"RESHARD_PORT", "5"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://gpu7:5");
  set({{"SLURM_STEP_NUM_NODES", "1"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://127.0.0.1:5");
  set({{"SLURM_STEP_NUM_NODES", "2"}, {"MASTER_ADDR", "a"}});
  EXPECT_EQ(job(), "3 of 4 at tcp://a:5");
}

TEST_F(LaunchTest, JobsOfOpenMpi) {
  set({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_MCA_ess_base_jobid", "9"}});
  set({{"OMPI_MCA_orte_hnp_uri", "1234.0;tcp://10.0.0.1,172.17.0.1:4567"}, {"SLURM_PROCID", "0"}});
  EXPECT_THAT(job(), testing::MatchesRegex("1 of 2 at tcp://10.0.0.1:2[0-9]{4}"));
  set({{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_THAT(job(), testing::MatchesRegex("1 of 2 at tcp://127.0.0.1:2[0-9]{4}"));
}

TEST_F(LaunchTest, MissingVariablesAreNamed) {
  EXPECT_EQ(job(), "rendezvous 'env://': found no variable of a launcher, expected RANK, WORLD_SIZE, MASTER_ADDR and "
                   "MASTER_PORT, or the variables of srun or mpirun");
  set({{"RANK", "1"}});
  EXPECT_EQ(job(), "rendezvous 'env://': found RANK=1, expected WORLD_SIZE beside RANK");
  set({{"WORLD_SIZE", "2"}});
  EXPECT_EQ(job(), "rendezvous 'env://': found RANK=1, WORLD_SIZE=2, expected MASTER_ADDR, the host of rank 0");
  set({{"MASTER_ADDR", "a"}});
  EXPECT_EQ(job(), "rendezvous 'env://': found RANK=1, WORLD_SIZE=2, MASTER_ADDR=a, expected RESHARD_PORT, a free port "
                   "on the host of rank 0, or MASTER_PORT, the port before it");
  for (const char *port : {"0", "65536", "x"}) {
    set({{"RESHARD_PORT", port}});
    EXPECT_THAT(job(), testing::HasSubstr("expected RESHARD_PORT"));
  }
}
