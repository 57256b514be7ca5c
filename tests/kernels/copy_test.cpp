// copyRows and fillRows against a loop over bytes: random shapes, every small row size, guard bytes around.

#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

using namespace reshard::kernels;

namespace {

/// Calls visit(source offset, target offset) for every row, the innermost loop fastest.
void forEachRow(const Strided &shape, size_t l, int64_t source, int64_t target, const std::function<void(int64_t, int64_t)> &visit) {
  if (l == shape.loopCount)
    return visit(source, target);
  for (uint64_t i = 0; i < shape.loops[l].count; ++i)
    forEachRow(shape, l + 1, source + static_cast<int64_t>(i) * shape.loops[l].sourceStride,
               target + static_cast<int64_t>(i) * shape.loops[l].targetStride, visit);
}

/// Random loops whose rows do not meet on either side: the two sides nest the loops in their own order, as a permuted tensor does.
Strided randomShape(std::mt19937_64 &random, uint64_t rowBytes, size_t loops) {
  Strided shape;
  shape.rowBytes = rowBytes;
  shape.loopCount = loops;
  std::vector<size_t> order(loops);
  for (size_t l = 0; l < loops; ++l) {
    order[l] = l;
    shape.loops[l].count = 1 + random() % 5;
  }
  for (const bool target : {false, true}) {
    std::shuffle(order.begin(), order.end(), random);
    int64_t next = static_cast<int64_t>(rowBytes + random() % 3);
    for (const size_t l : order) {
      (target ? shape.loops[l].targetStride : shape.loops[l].sourceStride) = next;
      next = next * static_cast<int64_t>(shape.loops[l].count) + static_cast<int64_t>(random() % 5);
    }
  }
  return shape;
}

int64_t extent(const Strided &shape, bool target) {
  int64_t end = static_cast<int64_t>(shape.rowBytes);
  for (size_t l = 0; l < shape.loopCount; ++l)
    end += static_cast<int64_t>(shape.loops[l].count - 1) * (target ? shape.loops[l].targetStride : shape.loops[l].sourceStride);
  return end;
}

constexpr int64_t kGuard = 128;

void checkCopy(std::mt19937_64 &random, const Strided &shape) {
  std::vector<std::byte> source(extent(shape, false)), target(extent(shape, true) + 2 * kGuard, std::byte{0x5A});
  for (std::byte &byte : source)
    byte = static_cast<std::byte>(random());
  std::vector<std::byte> expected = target;
  forEachRow(shape, 0, 0, 0, [&](int64_t from, int64_t to) { std::memcpy(&expected[kGuard + to], &source[from], shape.rowBytes); });
  Strided simple = shape;
  simplify(simple);
  ASSERT_EQ(simple.bytes(), shape.bytes());
  for (const Strided &each : {shape, simple}) {
    std::vector<std::byte> whole = target, cut = target;
    copyRows(whole.data() + kGuard, source.data(), each, 0, each.rows());
    ASSERT_EQ(whole, expected);
    whole = target;
    copyRows(whole.data() + kGuard, source.data(), each, 0, each.rows(), /*stream=*/true);
    ASSERT_EQ(whole, expected);
    for (uint64_t first = 0; first < each.rows();) { // the same in random runs of rows, as the workers do it
      const uint64_t count = std::min<uint64_t>(each.rows() - first, 1 + random() % 7);
      copyRows(cut.data() + kGuard, source.data(), each, first, count);
      first += count;
    }
    ASSERT_EQ(cut, expected);
  }
  std::vector<std::byte> zeroed = target;
  expected = target;
  forEachRow(shape, 0, 0, 0, [&](int64_t, int64_t to) { std::memset(&expected[kGuard + to], 0, shape.rowBytes); });
  fillRows(zeroed.data() + kGuard, shape, 0, shape.rows());
  ASSERT_EQ(zeroed, expected);
}

} // namespace

TEST(Copy, RandomShapes) {
  std::mt19937_64 random(1);
  const int cases = std::getenv("RESHARD_FULL") ? 50000 : 5000;
  for (int i = 0; i < cases; ++i)
    checkCopy(random, randomShape(random, 1 + random() % 40, random() % 5));
}

TEST(Copy, EverySmallRow) {
  std::mt19937_64 random(2);
  for (uint64_t row = 1; row <= 600; ++row)
    checkCopy(random, randomShape(random, row, 2));
}

TEST(Copy, LargeRows) {
  std::mt19937_64 random(3);
  for (uint64_t row : {4096ull, 65536ull, 1048577ull, 8ull << 20})
    checkCopy(random, randomShape(random, row, row < (1u << 20) ? 1 : 0));
}

TEST(Copy, NegativeStrides) {
  Strided shape;
  shape.rowBytes = 2;
  shape.loopCount = 1;
  shape.loops[0] = {4, -2, 2};
  const char source[] = "aabbccdd";
  char target[8];
  copyRows(reinterpret_cast<std::byte *>(target), reinterpret_cast<const std::byte *>(source) + 6, shape, 0, 4);
  EXPECT_EQ(std::string(target, 8), "ddccbbaa");
}

TEST(Simplify, JoinsWhatTouchesOnBothSides) {
  Strided shape;
  shape.rowBytes = 16;
  shape.loopCount = 3;
  shape.loops[0] = {3, 64, 64}; // continues the next: 3 x 4 rows of 16
  shape.loops[1] = {4, 16, 16};
  shape.loops[2] = {1, 999, 999};
  simplify(shape);
  EXPECT_EQ(shape.loopCount, 0u);
  EXPECT_EQ(shape.rowBytes, 3u * 4 * 16);
  shape.loopCount = 1;
  shape.loops[0] = {3, 192, 200}; // touches on the source side alone
  simplify(shape);
  EXPECT_EQ(shape.loopCount, 1u);
}
