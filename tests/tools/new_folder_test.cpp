// SPDX-License-Identifier: Apache-2.0
// Folders that are created atomically.

#include "tools/run/new_folder.h"

#include "tests/verify/support.h"

#include <gtest/gtest.h>

#include <atomic>
#include <sys/stat.h>
#include <thread>

using namespace reshard;
using namespace reshard::tools;

TEST(NewFolder, NeverReplacesAFolderCreatedMeanwhile) {
  tests::TemporaryFolder folder;
  for (int n = 0; n < 2000; ++n) {
    const std::string path = folder / std::to_string(n);
    const auto made = NewFolder::open(path, NewFolder::ownNumber(), true);
    ASSERT_TRUE(made.ok()) << made.status().message();
    std::atomic<bool> go = false, there = false;
    std::thread other([&] {
      while (!go) {
      }
      there = mkdir(path.c_str(), 0700) == 0;
    });
    go = true;
    const Status committed = (*made)->commit();
    other.join();
    ASSERT_NE(committed.ok(), there) << n;
    if (!committed.ok()) {
      EXPECT_EQ(committed.kind(), ErrorKind::failed);
    }
  }
}
