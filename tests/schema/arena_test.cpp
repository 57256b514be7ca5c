// SPDX-License-Identifier: Apache-2.0
#include "schema/step_rules.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace reshard::schema {
namespace {

std::multiset<uint32_t> take(ArenaUse &use, int64_t begin, int64_t end, uint32_t step) {
  std::multiset<uint32_t> before;
  use.take(begin, end, step, [&](uint32_t each) { before.insert(each); });
  return before;
}

TEST(ArenaUse, ReportsTheLastUseOfEachRange) {
  using Steps = std::multiset<uint32_t>;
  ArenaUse use;
  EXPECT_EQ(take(use, 0, 100, 0), Steps{});
  EXPECT_EQ(take(use, 0, 100, 1), Steps{0}); // the same slot
  EXPECT_EQ(take(use, 0, 40, 2), Steps{1});  // its first part
  EXPECT_EQ(take(use, 0, 100, 3), (Steps{1, 2}));
  EXPECT_EQ(take(use, 30, 60, 4), Steps{3}); // inside it: a part before and a part after remain
  EXPECT_EQ(take(use, 60, 100, 5), Steps{3});
  EXPECT_EQ(take(use, 20, 70, 6), (Steps{3, 4, 5}));
  EXPECT_EQ(take(use, 100, 120, 7), Steps{});
  EXPECT_EQ(take(use, 0, 200, 8), (Steps{3, 5, 6, 7}));
}

// The same steps as those of an array with the last step of each byte.
TEST(ArenaUse, RandomRanges) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    constexpr int64_t kBytes = 40;
    ArenaUse use;
    std::vector<int64_t> last(kBytes, -1);
    for (uint32_t step = 0; step < 100; ++step) {
      const auto begin = static_cast<int64_t>(random() % kBytes);
      const auto end = begin + 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(kBytes - begin));
      std::set<uint32_t> expected;
      for (int64_t at = begin; at < end; ++at) {
        if (last[at] >= 0)
          expected.insert(static_cast<uint32_t>(last[at]));
        last[at] = step;
      }
      const std::multiset<uint32_t> found = take(use, begin, end, step);
      ASSERT_EQ(std::set<uint32_t>(found.begin(), found.end()), expected) << "trial " << trial << ", step " << step;
    }
  }
}

} // namespace
} // namespace reshard::schema
