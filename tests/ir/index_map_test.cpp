// SPDX-License-Identifier: Apache-2.0
// The operations on index maps, compared with the same operations on std::map of single positions.

#include "ir/index_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>

using namespace reshard::ir;

namespace {

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

int64_t pick(std::mt19937_64 &random, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random() % (most - least + 1));
}

/// A few periodic blocks that do not overlap on either side. One in six is reversed on the `to` side.
IndexMap randomRelation(std::mt19937_64 &random) {
  IndexMap result;
  std::map<int64_t, int64_t> from, to;
  for (int64_t blocks = pick(random, 1, 4); blocks > 0; --blocks) {
    IndexBlock s{pick(random, 0, 60), pick(random, 0, 60), pick(random, 1, 7), pick(random, 1, 12), 0, 0};
    if (s.count > 1) {
      s.fromStep = s.length + pick(random, 0, 9);
      s.toStep = s.length + pick(random, 0, 9);
      if (random() % 6 == 0) {
        s.to += s.toStep * (s.count - 1);
        s.toStep = -s.toStep;
      }
    }
    auto newFrom = from, newTo = to;
    bool overlaps = false;
    for (int64_t i = 0; i < s.count; ++i)
      for (int64_t k = 0; k < s.length; ++k) {
        const int64_t x = s.from + i * s.fromStep + k, y = s.to + i * s.toStep + k;
        overlaps = overlaps || !newFrom.emplace(x, y).second || !newTo.emplace(y, x).second;
      }
    if (overlaps)
      continue;
    from = newFrom;
    to = newTo;
    result.push_back(s);
  }
  return normalize(result);
}

} // namespace

TEST(IndexMap, AgreesWithMapsOfPairs) {
  std::mt19937_64 random(1);
  const int cases = std::getenv("RESHARD_FULL") ? 200000 : 20000;
  size_t related = 0;
  for (int n = 0; n < cases; ++n) {
    const IndexMap a = randomRelation(random), b = randomRelation(random);
    const Pairs pairsA = expand(a), pairsB = expand(b);
    const std::map<int64_t, int64_t> mapB(pairsB.begin(), pairsB.end());
    Pairs composed, inverted, rest, restricted;
    for (const auto &[x, y] : pairsA) {
      inverted.emplace_back(y, x);
      if (const auto z = mapB.find(y); z != mapB.end())
        composed.emplace_back(x, z->second);
      if (mapB.count(x))
        restricted.emplace_back(x, y);
      else
        rest.emplace_back(x, x);
    }
    std::sort(inverted.begin(), inverted.end());
    ASSERT_EQ(expand(compose(a, b)), composed) << "case " << n;
    ASSERT_EQ(expand(inverse(a)), inverted) << "case " << n;
    ASSERT_EQ(expand(difference(a, b)), rest) << "case " << n;
    ASSERT_EQ(expand(restrict(a, b)), restricted) << "case " << n;
    ASSERT_EQ(positionCount(a), static_cast<int64_t>(pairsA.size()));
    ASSERT_EQ(disjointFrom(a, b), restricted.empty());
    ASSERT_EQ(sameFrom(a, b), restricted.size() == pairsA.size() && pairsA.size() == pairsB.size());
    int64_t next = 0;
    const Pairs numbered = expand(dense(a));
    ASSERT_EQ(numbered.size(), pairsA.size());
    for (size_t i = 0; i < numbered.size(); ++i) {
      ASSERT_EQ(numbered[i], std::make_pair(pairsA[i].first, next++));
      ASSERT_EQ(map(a, pairsA[i].first), pairsA[i].second);
    }
    related += composed.size();
  }
  EXPECT_GT(related, static_cast<size_t>(cases));
}

TEST(IndexMap, CompositionOfPeriodicBlocksStaysSmall) {
  // Block-cyclic 3 over 2 against block-cyclic 5 over 4: one period is lcm(6, 20) = 60 rows.
  const IndexMap a{{0, 0, 3, 1'000'000, 6, 3}}, b{{0, 0, 5, 300'000, 20, 5}};
  const IndexMap both = compose(inverse(a), b);
  EXPECT_LE(both.size(), 12u);
  int64_t rows = 0;
  for (int64_t row = 0; row < 6'000'000; ++row)
    rows += row % 6 < 3 && row % 20 < 5;
  EXPECT_EQ(positionCount(both), rows);
  // Composed with one contiguous half, whose ends cut a repetition.
  EXPECT_LE(compose(a, IndexMap{{1, 0, 1'500'000, 1, 0, 0}}).size(), 3u);
}

TEST(IndexMap, NormalForm) {
  EXPECT_EQ(normalize({{4, 4, 4, 1, 0, 0}, {0, 0, 4, 1, 0, 0}}), identity(8));
  EXPECT_EQ(normalize({{0, 0, 2, 1, 0, 0}, {4, 2, 2, 1, 0, 0}, {8, 4, 2, 1, 0, 0}}), (IndexMap{{0, 0, 2, 3, 4, 2}}));
  EXPECT_EQ(normalize({{0, 0, 2, 4, 2, 2}}), identity(8));
  EXPECT_TRUE(normalize({{0, 0, 0, 1, 0, 0}}).empty());
  EXPECT_TRUE(identity(0).empty());
}
