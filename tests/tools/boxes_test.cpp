// Nests are cut along boxes into pieces that say, element for element, what looking at each element says.

#include "tools/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace reshard::tools;

namespace {

/// All elements, the last loop fastest.
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

TEST(Boxes, PiecesSayWhatElementsSay) {
  std::mt19937_64 random(1);
  auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  int done = 0, missing = 0, folded = 0;
  for (int round = 0; round < 20000; ++round) {
    Boxes boxes;
    std::map<int64_t, std::set<std::pair<uint32_t, int64_t>>> truth; // by place: tags and values
    int64_t places = 0;
    // Half of them tile what the nest looks at: a few boxes side by side that repeat, as columns of several ranks do.
    const bool tiles = round % 2 == 0;
    const int64_t width = between(1, 4), columns = between(1, 4), rows = between(1, 6), period = width * columns;
    for (int64_t b = 0, count = tiles ? columns : between(1, 5); b < count; ++b) {
      Box box;
      box.tag = static_cast<uint32_t>(b);
      box.value = between(0, 100);
      if (tiles) {
        box.begin = b * width;
        box.dimensions = {{rows, period, between(-3, 9)}, {width, 1, between(0, 2)}};
      } else {
        box.begin = between(0, 40);
        for (int64_t d = between(0, 3); d > 0; --d)
          box.dimensions.push_back({between(1, 4), between(d == 1 ? 1 : -9, 9), between(-5, 5)});
      }
      forEach(box.dimensions, [&](const std::vector<int64_t> &at) {
        int64_t place = box.begin, value = box.value;
        for (size_t d = 0; d < at.size(); ++d) {
          place += at[d] * box.dimensions[d].step;
          value += at[d] * box.dimensions[d].value;
        }
        truth[place].insert({box.tag, value});
        ++places;
      });
      ASSERT_TRUE(boxes.add(box));
    }
    boxes.finish();
    EXPECT_EQ(boxes.places(), places);
    for (const int64_t size : {rows * period, rows * period - 1, int64_t{12}}) {
      uint64_t work = 0;
      bool once = places == size;
      for (int64_t place = 0; place < size; ++place)
        once = once && truth.count(place);
      EXPECT_EQ(boxes.partition(size, work), once);
    }

    Nest nest{between(0, tiles ? 3 : 30), 7, 0, {}};
    int64_t elements = 1;
    for (int64_t l = between(0, 3); l > 0; --l)
      nest.loops.push_back(
          {between(1, 5), tiles && l > 1 ? period * between(0, 1) : between(-2, 5), between(-4, 9), 0});
    for (size_t l = nest.loops.size(); l-- > 0;) { // so that `also` is a number of the element
      nest.loops[l].also = elements;
      elements *= nest.loops[l].count;
    }
    std::vector<std::pair<int64_t, int64_t>> expected(static_cast<size_t>(elements)); // place, with
    bool hole = false;
    forEach(nest.loops, [&](const std::vector<int64_t> &at) {
      int64_t place = nest.place, with = nest.with, also = 0;
      for (size_t l = 0; l < at.size(); ++l) {
        place += at[l] * nest.loops[l].place;
        with += at[l] * nest.loops[l].with;
        also += at[l] * nest.loops[l].also;
      }
      expected[static_cast<size_t>(also)] = {place, with};
      hole = hole || !truth.count(place);
    });
    uint64_t work = 0;
    Cutter cutter(boxes, work);
    std::vector<int> seen(static_cast<size_t>(elements));
    int64_t pieces = 0;
    const Cut cut = cutter.run(nest, [&](const Piece &piece) {
      ++pieces;
      EXPECT_EQ(piece.place, expected[static_cast<size_t>(piece.also)].first);
      forEach(piece.loops, [&](const std::vector<int64_t> &at) {
        int64_t with = piece.with, also = piece.also, value = piece.value;
        for (size_t l = 0; l < at.size(); ++l) {
          EXPECT_GT(piece.loops[l].count, 1);
          with += at[l] * piece.loops[l].with;
          also += at[l] * piece.loops[l].also;
          value += at[l] * piece.loops[l].value;
        }
        ASSERT_TRUE(also >= 0 && also < elements);
        const auto &[place, expectedWith] = expected[static_cast<size_t>(also)];
        EXPECT_EQ(with, expectedWith);
        EXPECT_TRUE(truth[place].count({piece.box->tag, value}))
            << "place " << place << " tag " << piece.box->tag << " value " << value;
        ++seen[static_cast<size_t>(also)];
      });
      return true;
    });
    if (hole) {
      ++missing;
      EXPECT_EQ(cut, Cut::missing);
      EXPECT_FALSE(truth.count(cutter.place()) && !truth[cutter.place()].empty());
      EXPECT_EQ(expected[static_cast<size_t>(cutter.also())].first, cutter.place());
      continue;
    }
    ++done;
    folded += pieces * 2 <= elements;
    EXPECT_EQ(cut, Cut::done);
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
    if (HasFailure())
      FAIL() << "round " << round;
  }
  EXPECT_GE(done, 2000);
  EXPECT_GE(missing, 2000);
  EXPECT_GE(folded, 1000);
}

/// 64 columns of 2^30 rows: each is one piece, from both sides, and so are all bytes.
TEST(Boxes, WorkGrowsWithPieces) {
  constexpr int64_t kRows = int64_t{1} << 30, kColumns = 64, kWidth = 256;
  Boxes boxes;
  for (int64_t c = 0; c < kColumns; ++c)
    ASSERT_TRUE(
        boxes.add({c * kWidth, 0, static_cast<uint32_t>(c), {{kRows, kColumns * kWidth, kWidth}, {kWidth, 1, 1}}, 0}));
  boxes.finish();
  uint64_t work = 0;
  EXPECT_TRUE(boxes.partition(kRows * kColumns * kWidth, work));
  EXPECT_FALSE(boxes.partition(kRows * kColumns * kWidth - 1, work));
  int pieces = 0;
  Cutter cutter(boxes, work);
  const auto count = [&](const Piece &) { return ++pieces > 0; };
  // Columns of another width, and from the middle of a row.
  EXPECT_EQ(cutter.run({100, 0, 0, {{kRows - 1, kColumns * kWidth, 384, 0}, {384, 1, 1, 0}}}, count), Cut::done);
  EXPECT_EQ(pieces, 2);
  EXPECT_EQ(
      cutter.run({kColumns * kWidth - 100, 0, 0, {{kRows - 1, kColumns * kWidth, 384, 0}, {384, 1, 1, 0}}}, count),
      Cut::done);
  EXPECT_EQ(pieces, 5);
  EXPECT_LT(work, 2000u);
}

/// What has no digits, and what is read in another order.
TEST(Boxes, WhatDoesNotNestIsSplit) {
  Boxes boxes;
  ASSERT_TRUE(boxes.add({0, 0, 0, {{3, 3, 10}, {2, 5, 1}}, 0})); // 0 3 6 5 8 11
  EXPECT_EQ(boxes.places(), 6);
  EXPECT_GT(boxes.list().size(), 1u);
  Boxes standing;
  ASSERT_TRUE(standing.add({0, 0, 0, {{4, 0, 0}, {2, 1, 1}}, 0}));
  EXPECT_EQ(standing.places(), 8);
  standing.finish();
  uint64_t work = 0;
  EXPECT_FALSE(standing.partition(2, work));
  Boxes scattered;
  EXPECT_FALSE(scattered.add({0, 0, 0, {{int64_t{1} << 40, 3, 0}, {3, 2, 0}}, 0}));
}

/// More pieces than are kept in memory come all the same, each once; and who has enough of them ends it.
TEST(Boxes, ManyPieces) {
  constexpr int64_t kCount = 600'000;
  Boxes boxes;
  for (int64_t i = 0; i < kCount; ++i) // values go in no even steps
    ASSERT_TRUE(boxes.add({i, i * i, 0, {}, 0}));
  boxes.finish();
  uint64_t work = 0;
  int64_t next = 0, sum = 0;
  EXPECT_EQ(Cutter(boxes, work)
                .run({0, 0, 0, {{kCount, 1, 1, 1}}},
                     [&](const Piece &piece) {
                       sum += piece.value - piece.with * piece.with;
                       return piece.also == next++;
                     }),
            Cut::done);
  EXPECT_EQ(next, kCount);
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(
      Cutter(boxes, work).run({0, 0, 0, {{kCount, 1, 1, 1}}}, [&](const Piece &piece) { return piece.place < 10; }),
      Cut::stopped);
  work = Cutter::kMaxWork;
  EXPECT_EQ(Cutter(boxes, work).run({0, 0, 0, {{kCount, 1, 1, 1}}}, [](const Piece &) { return true; }),
            Cut::fragmented);
}

} // namespace
