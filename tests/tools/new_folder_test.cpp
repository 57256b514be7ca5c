// SPDX-License-Identifier: Apache-2.0
// Folders that are created atomically.

#include "tools/run/new_folder.h"

#include "tests/verify/support.h"

#include <gtest/gtest.h>

#include <atomic>
#include <sys/stat.h>
#include <thread>

using namespace reshard;
using namespace reshard::command;
using namespace reshard::tools;

TEST(NewFolder, NeverReplacesAFolderCreatedMeanwhile) {
  tests::TemporaryFolder folder;
  for (int n = 0; n < 2000; ++n) {
    const std::string path = folder / std::to_string(n);
    NewFolder made(path, NewFolder::ownNumber(), true);
    std::atomic<bool> go = false, there = false;
    std::thread other([&] {
      while (!go) {
      }
      there = mkdir(path.c_str(), 0700) == 0;
    });
    bool committed = true;
    go = true;
    try {
      made.commit();
    } catch (const Failure &failure) {
      committed = false;
      EXPECT_EQ(failure.code, kFailure);
    }
    other.join();
    ASSERT_NE(committed, there) << n;
  }
}
