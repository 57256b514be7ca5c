// SPDX-License-Identifier: Apache-2.0
// A deadline ends the work on all threads.

#include "analysis/files/new_folder.h"
#include "analysis/work_deadline.h"
#include "base/parallel.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::analysis;

TEST(WorkDeadline, EndsWorkOnEveryThread) {
  try {
    const WorkDeadline deadline("the check", 0.05);
    parallelFor(4, 4, [](size_t) {
      while (true)
        WorkDeadline::spend(1000);
    });
    FAIL();
  } catch (const Failure &failure) {
    EXPECT_EQ(failure.code, kFailure);
    EXPECT_EQ(failure.message, "the check did not finish within the deadline of 0.05 s (--timeout)");
  }
  WorkDeadline::spend(1 << 30); // the deadline no longer exists
  const WorkDeadline none("nothing", 0);
  WorkDeadline::spend(1 << 30);
}
