// SPDX-License-Identifier: Apache-2.0
// A deadline ends the work on all threads.

#include "base/parallel.h"
#include "base/work_deadline.h"

#include <gtest/gtest.h>

using namespace reshard;

TEST(WorkDeadline, EndsWorkOnEveryThread) {
  const Status late = WorkDeadline::run("the check", 0.05, [] {
    parallelFor(4, 4, [](size_t) {
      while (true)
        WorkDeadline::spend(1000);
    });
    return Status();
  });
  EXPECT_TRUE(late.timedOut());
  EXPECT_EQ(late.message(), "the check did not finish within the deadline of 0.05 s (--timeout)");
  WorkDeadline::spend(1 << 30); // the deadline no longer exists
  const Status none = WorkDeadline::run("nothing", 0, [] {
    WorkDeadline::spend(1 << 30);
    return negative("no");
  });
  EXPECT_EQ(none.kind(), ErrorKind::negative);
}
