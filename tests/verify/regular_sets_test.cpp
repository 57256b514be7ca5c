// SPDX-License-Identifier: Apache-2.0
// Splits random loop nests at the borders of regular sets and compares the fragments with the result for each element.

#include "verify/proof/regular_sets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace reshard::verify;

namespace {

/// Visits all elements, the last loop fastest.
template <class Loops, class Visit> void forEach(const Loops &loops, Visit visit) {
  std::vector<int64_t> at(loops.size());
  while (true) {
    visit(at);
    size_t l = loops.size();
    while (l > 0 && ++at[l - 1] == loops[l - 1].count)
      at[--l] = 0;
    if (l == 0)
      return;
  }
}

TEST(RegularSets, FragmentsMatchElements) {
  std::mt19937_64 random(1);
  auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  int done = 0, missing = 0, folded = 0;
  for (int round = 0; round < 20000; ++round) {
    RegularSets sets;
    std::map<int64_t, std::set<std::pair<uint32_t, int64_t>>> truth; // by position: tags and values
    int64_t positions = 0;
    // Half of the cases tile the range of the nest with a few adjacent sets that repeat, like column shards of several
    // ranks.
    const bool tiles = round % 2 == 0;
    const int64_t width = between(1, 4), columns = between(1, 4), rows = between(1, 6), period = width * columns;
    for (int64_t b = 0, count = tiles ? columns : between(1, 5); b < count; ++b) {
      RegularSet set;
      set.tag = static_cast<uint32_t>(b);
      set.value = between(0, 100);
      if (tiles) {
        set.begin = b * width;
        set.dimensions = {{rows, period, between(-3, 9)}, {width, 1, between(0, 2)}};
      } else {
        set.begin = between(0, 40);
        for (int64_t d = between(0, 3); d > 0; --d)
          set.dimensions.push_back({between(1, 4), between(d == 1 ? 1 : -9, 9), between(-5, 5)});
      }
      forEach(set.dimensions, [&](const std::vector<int64_t> &at) {
        int64_t position = set.begin, value = set.value;
        for (size_t d = 0; d < at.size(); ++d) {
          position += at[d] * set.dimensions[d].step;
          value += at[d] * set.dimensions[d].value;
        }
        truth[position].insert({set.tag, value});
        ++positions;
      });
      ASSERT_TRUE(sets.add(set));
    }
    sets.finish();
    EXPECT_EQ(sets.positions(), positions);
    for (const int64_t size : {rows * period, rows * period - 1, int64_t{12}}) {
      uint64_t work = 0;
      bool once = positions == size;
      for (int64_t position = 0; position < size; ++position)
        once = once && truth.count(position);
      EXPECT_EQ(sets.partition(size, work), once);
    }

    LoopNest nest{between(0, tiles ? 3 : 30), 7, 0, {}};
    int64_t elements = 1;
    for (int64_t l = between(0, 3); l > 0; --l)
      nest.loops.push_back(
          {between(1, 5), tiles && l > 1 ? period * between(0, 1) : between(-2, 5), between(-4, 9), 0});
    for (size_t l = nest.loops.size(); l-- > 0;) { // so that `origin` is the index of the element
      nest.loops[l].origin = elements;
      elements *= nest.loops[l].count;
    }
    std::vector<std::pair<int64_t, int64_t>> expected(static_cast<size_t>(elements)); // position, counterpart
    bool hole = false;
    forEach(nest.loops, [&](const std::vector<int64_t> &at) {
      int64_t position = nest.position, counterpart = nest.counterpart, origin = 0;
      for (size_t l = 0; l < at.size(); ++l) {
        position += at[l] * nest.loops[l].position;
        counterpart += at[l] * nest.loops[l].counterpart;
        origin += at[l] * nest.loops[l].origin;
      }
      expected[static_cast<size_t>(origin)] = {position, counterpart};
      hole = hole || !truth.count(position);
    });
    uint64_t work = 0;
    NestSplitter splitter(sets, work);
    std::vector<int> seen(static_cast<size_t>(elements));
    int64_t fragments = 0;
    const SplitStatus status = splitter.run(nest, [&](const Fragment &fragment) {
      ++fragments;
      EXPECT_EQ(fragment.position, expected[static_cast<size_t>(fragment.origin)].first);
      forEach(fragment.loops, [&](const std::vector<int64_t> &at) {
        int64_t counterpart = fragment.counterpart, origin = fragment.origin, value = fragment.value;
        for (size_t l = 0; l < at.size(); ++l) {
          EXPECT_GT(fragment.loops[l].count, 1);
          counterpart += at[l] * fragment.loops[l].counterpart;
          origin += at[l] * fragment.loops[l].origin;
          value += at[l] * fragment.loops[l].value;
        }
        ASSERT_TRUE(origin >= 0 && origin < elements);
        const auto &[position, expectedCounterpart] = expected[static_cast<size_t>(origin)];
        EXPECT_EQ(counterpart, expectedCounterpart);
        EXPECT_TRUE(truth[position].count({fragment.set->tag, value}))
            << "place " << position << " tag " << fragment.set->tag << " value " << value;
        ++seen[static_cast<size_t>(origin)];
      });
      return true;
    });
    if (hole) {
      ++missing;
      EXPECT_EQ(status, SplitStatus::missing);
      EXPECT_FALSE(truth.count(splitter.position()) && !truth[splitter.position()].empty());
      EXPECT_EQ(expected[static_cast<size_t>(splitter.origin())].first, splitter.position());
      continue;
    }
    ++done;
    folded += fragments * 2 <= elements;
    EXPECT_EQ(status, SplitStatus::done);
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
    if (HasFailure())
      FAIL() << "round " << round;
  }
  EXPECT_GE(done, 2000);
  EXPECT_GE(missing, 2000);
  EXPECT_GE(folded, 1000);
}

/// 64 columns of 2^30 rows: each column is one fragment in both directions, and so is the whole range.
TEST(RegularSets, WorkGrowsWithFragments) {
  constexpr int64_t kRows = int64_t{1} << 30, kColumns = 64, kWidth = 256;
  RegularSets sets;
  for (int64_t c = 0; c < kColumns; ++c)
    ASSERT_TRUE(
        sets.add({c * kWidth, 0, static_cast<uint32_t>(c), {{kRows, kColumns * kWidth, kWidth}, {kWidth, 1, 1}}, 0}));
  sets.finish();
  uint64_t work = 0;
  EXPECT_TRUE(sets.partition(kRows * kColumns * kWidth, work));
  EXPECT_FALSE(sets.partition(kRows * kColumns * kWidth - 1, work));
  int fragments = 0;
  NestSplitter splitter(sets, work);
  const auto count = [&](const Fragment &) { return ++fragments > 0; };
  // Columns of another width, beginning in the middle of a row.
  EXPECT_EQ(splitter.run({100, 0, 0, {{kRows - 1, kColumns * kWidth, 384, 0}, {384, 1, 1, 0}}}, count),
            SplitStatus::done);
  EXPECT_EQ(fragments, 2);
  EXPECT_EQ(
      splitter.run({kColumns * kWidth - 100, 0, 0, {{kRows - 1, kColumns * kWidth, 384, 0}, {384, 1, 1, 0}}}, count),
      SplitStatus::done);
  EXPECT_EQ(fragments, 5);
  EXPECT_LT(work, 2000u);
}

/// Sets whose dimensions do not nest, and accesses in another order.
TEST(RegularSets, SetsThatDoNotNestAreSplit) {
  RegularSets sets;
  ASSERT_TRUE(sets.add({0, 0, 0, {{3, 3, 10}, {2, 5, 1}}, 0})); // 0 3 6 5 8 11
  EXPECT_EQ(sets.positions(), 6);
  EXPECT_GT(sets.list().size(), 1u);
  RegularSets repeated;
  ASSERT_TRUE(repeated.add({0, 0, 0, {{4, 0, 0}, {2, 1, 1}}, 0}));
  EXPECT_EQ(repeated.positions(), 8);
  repeated.finish();
  uint64_t work = 0;
  EXPECT_FALSE(repeated.partition(2, work));
  RegularSets scattered;
  EXPECT_FALSE(scattered.add({0, 0, 0, {{int64_t{1} << 40, 3, 0}, {3, 2, 0}}, 0}));
}

/// More fragments than are kept in memory are visited, each once; a visitor can stop the splitter.
TEST(RegularSets, ManyFragments) {
  constexpr int64_t kCount = 600'000;
  RegularSets sets;
  for (int64_t i = 0; i < kCount; ++i) // irregular values
    ASSERT_TRUE(sets.add({i, i * i, 0, {}, 0}));
  sets.finish();
  uint64_t work = 0;
  int64_t next = 0, sum = 0;
  EXPECT_EQ(NestSplitter(sets, work)
                .run({0, 0, 0, {{kCount, 1, 1, 1}}},
                     [&](const Fragment &fragment) {
                       sum += fragment.value - fragment.counterpart * fragment.counterpart;
                       return fragment.origin == next++;
                     }),
            SplitStatus::done);
  EXPECT_EQ(next, kCount);
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(NestSplitter(sets, work)
                .run({0, 0, 0, {{kCount, 1, 1, 1}}}, [&](const Fragment &fragment) { return fragment.position < 10; }),
            SplitStatus::stopped);
  work = NestSplitter::kMaxWork;
  EXPECT_EQ(NestSplitter(sets, work).run({0, 0, 0, {{kCount, 1, 1, 1}}}, [](const Fragment &) { return true; }),
            SplitStatus::fragmented);
}

} // namespace
