// SPDX-License-Identifier: Apache-2.0
// Rendezvous: the environment of launchers, a file with rank 0's id.

#include "executor/launch.h"
#include "tests/analysis/support.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

using namespace reshard;

namespace {

class LaunchTest : public testing::Test {
public:
  LaunchTest() {
    for (const char *name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK",
                             "PMI_SIZE", "MPI_LOCALRANKID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID",
                             "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"})
      unsetenv(name);
  }
  tests::TemporaryFolder folder;
};

Deadline in(int milliseconds) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds); }

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
  EXPECT_TRUE(findLaunch().mpi);
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  EXPECT_EQ(findLaunch().rank, 11u);
  EXPECT_EQ(findLaunch().size, 16u);
  EXPECT_EQ(findLaunch().localRank, 3u);
  EXPECT_FALSE(findLaunch().mpi);
  unsetenv("RANK"); // torchrun's agent process has no RANK
  EXPECT_EQ(findLaunch().rank, 1u);
}

TEST_F(LaunchTest, RankZeroWritesAndTheOthersRead) {
  const std::string path = folder / "id";
  std::byte ids[3][100] = {};
  for (std::byte &each : ids[0])
    each = std::byte{7};
  Status results[3];
  std::vector<std::thread> readers;
  for (const uint32_t rank : {1u, 2u})
    readers.emplace_back([&, rank] { results[rank] = broadcastByFile(path, rank, ids[rank], 100, in(60'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  results[0] = broadcastByFile(path, 0, ids[0], 100, {});
  for (std::thread &reader : readers)
    reader.join();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(results[rank].message(), "");
    EXPECT_EQ(ids[rank][99], std::byte{7});
  }
  EXPECT_EQ(broadcastByFile(path, 0, ids[0], 100, {}).message(),
            "'" + path + "' already exists, expected a new file for each launch");
  const Status tooShort = broadcastByFile(path, 1, ids[1], 99, {});
  EXPECT_EQ(tooShort.message(),
            "'" + path + "' does not have 99 bytes, expected the file that rank 0 of this launch writes");
  EXPECT_FALSE(tooShort.timedOut());
  const Status missing = broadcastByFile(folder / "other", 1, ids[1], 100, in(15));
  EXPECT_EQ(missing.message(), "timed out waiting for '" + (folder / "other") + "', which rank 0 writes");
  EXPECT_TRUE(missing.timedOut());
}
