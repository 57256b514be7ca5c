// SPDX-License-Identifier: Apache-2.0
// copyRows at every level of this CPU, and fillRows, compared with a loop over rows: random shapes, every small row
// size, transposed and reversed loops, every alignment within a cache line, with guard bytes around the memory.

#include "kernels/cpu/streaming_stores.h"
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace reshard::kernels;

namespace {

/// Calls visit(source offset, target offset) for every row, the innermost loop fastest.
void forEachRow(const Strided &shape, size_t l, int64_t source, int64_t target,
                const std::function<void(int64_t, int64_t)> &visit) {
  if (l == shape.loopCount)
    return visit(source, target);
  for (uint64_t i = 0; i < shape.loops[l].count; ++i)
    forEachRow(shape, l + 1, source + static_cast<int64_t>(i) * shape.loops[l].sourceStride,
               target + static_cast<int64_t>(i) * shape.loops[l].targetStride, visit);
}

/// Random loops whose rows are not adjacent on either side. Each side nests the loops in its own order, as for a
/// permuted tensor.
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

/// Returns the bytes from the begin of the first row down to the lowest byte, and up to the end of the highest byte.
std::pair<int64_t, int64_t> extent(const Strided &shape, bool target) {
  int64_t below = 0, above = static_cast<int64_t>(shape.rowBytes);
  for (size_t l = 0; l < shape.loopCount; ++l) {
    const int64_t last = static_cast<int64_t>(shape.loops[l].count - 1) *
                         (target ? shape.loops[l].targetStride : shape.loops[l].sourceStride);
    (last < 0 ? below : above) += last;
  }
  return {-below, above};
}

/// Memory for one side of a shape, between guards. The first row begins `offset` bytes after a cache line boundary.
class Side {
public:
  Side(const Strided &shape, bool target, uint64_t offset) {
    const auto [below, above] = extent(shape, target);
    const int64_t first = (below + kGuard + 63) / 64 * 64 + static_cast<int64_t>(offset);
    bytes_.assign(static_cast<size_t>(first + above + kGuard + 63), std::byte{0x5A});
    first_ = first + static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64);
  }
  std::byte *first() { return bytes_.data() + first_; }
  std::vector<std::byte> &bytes() { return bytes_; }
  void reset() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0x5A}); }

private:
  static constexpr int64_t kGuard = 128;
  std::vector<std::byte> bytes_;
  int64_t first_;
};

void checkCopy(std::mt19937_64 &random, const Strided &shape, uint64_t targetOffset, uint64_t sourceOffset) {
  Side source(shape, false, sourceOffset), target(shape, true, targetOffset);
  for (std::byte &byte : source.bytes())
    byte = static_cast<std::byte>(random());
  forEachRow(shape, 0, 0, 0, [&](int64_t from, int64_t to) {
    for (uint64_t i = 0; i < shape.rowBytes; ++i)
      target.first()[to + static_cast<int64_t>(i)] = source.first()[from + static_cast<int64_t>(i)];
  });
  const std::vector<std::byte> expected = target.bytes();
  Strided simple = shape;
  simplify(simple);
  ASSERT_EQ(simple.bytes(), shape.bytes());
  for (const Strided &each : {shape, simple})
    for (int level = 0; level <= static_cast<int>(cpuLevel()); ++level)
      for (const bool stream : {false, true})
        for (const bool cut : {false, true}) { // in random ranges of rows, as worker threads copy them
          target.reset();
          for (uint64_t first = 0; first < each.rows();) {
            const uint64_t count =
                cut ? std::min(each.rows() - first, 1 + random() % (1 + random() % (each.rows() + 5))) : each.rows();
            copyRowsAt(static_cast<CpuLevel>(level), {target.first(), source.first(), each, first, count}, stream);
            first += count;
          }
          ASSERT_TRUE(target.bytes() == expected)
              << "row " << shape.rowBytes << " level " << level << " stream " << stream << " cut " << cut;
        }
  target.reset();
  forEachRow(shape, 0, 0, 0, [&](int64_t, int64_t to) { std::memset(target.first() + to, 0, shape.rowBytes); });
  const std::vector<std::byte> zeros = target.bytes();
  target.reset();
  fillRows(target.first(), shape, 0, shape.rows());
  ASSERT_TRUE(target.bytes() == zeros) << "row " << shape.rowBytes;
}

void checkCopy(std::mt19937_64 &random, const Strided &shape) {
  const uint64_t targetOffset = random() % 3 ? random() % 64 : 0, sourceOffset = random() % 3 ? random() % 64 : 0;
  checkCopy(random, shape, targetOffset, sourceOffset);
}

/// Reverses the direction of a loop on one side or on both.
void reverse(std::mt19937_64 &random, Strided &shape) {
  for (size_t l = 0; l < shape.loopCount; ++l) {
    if (random() % 2)
      shape.loops[l].sourceStride *= -1;
    if (random() % 2)
      shape.loops[l].targetStride *= -1;
  }
}

/// `count` rows; they are contiguous on a side whose gap is 0.
Strided spaced(uint64_t rowBytes, uint64_t count, uint64_t sourceGap, uint64_t targetGap) {
  Strided shape;
  shape.rowBytes = rowBytes;
  shape.loopCount = 1;
  shape.loops[0] = {count, static_cast<int64_t>(rowBytes + sourceGap), static_cast<int64_t>(rowBytes + targetGap)};
  return shape;
}

} // namespace

TEST(Copy, RandomShapes) {
  std::mt19937_64 random(1);
  const int cases = std::getenv("RESHARD_FULL") ? 50000 : 3000;
  for (int i = 0; i < cases; ++i) {
    Strided shape = randomShape(random, 1 + random() % 40, random() % 5);
    if (i % 4 == 0)
      reverse(random, shape);
    checkCopy(random, shape);
  }
}

TEST(Copy, EverySmallRow) {
  std::mt19937_64 random(2);
  for (uint64_t row = 1; row <= 600; ++row)
    checkCopy(random, randomShape(random, row, 2));
}

// Many rows that are contiguous in the target are collected and streamed; rows contiguous only in the source are not.
TEST(Copy, EverySmallRowWithAndWithoutGaps) {
  std::mt19937_64 random(3);
  for (uint64_t row = 1; row <= 600; ++row) {
    const uint64_t count = 5000 / row + random() % 20;
    checkCopy(random, spaced(row, count, 1 + random() % 200, 0));
    checkCopy(random, spaced(row, count, 0, 1 + random() % 200));
  }
}

TEST(Copy, RowsOfWholeLines) {
  std::mt19937_64 random(4);
  for (uint64_t row = 64; row <= 8192; row *= 2)
    for (const auto &[sourceGap, targetGap] : {std::pair{64, 128}, {17, 0}, {0, 64}, {33, 192}}) {
      checkCopy(random, spaced(row, 37, sourceGap, targetGap), 0, 0);
      checkCopy(random, spaced(row, 37, sourceGap, targetGap), 0, 13);
      checkCopy(random, spaced(row, 37, sourceGap, targetGap), 32, 0);
    }
}

TEST(Copy, LargeRows) {
  std::mt19937_64 random(5);
  for (uint64_t row : {4096ull, 65536ull, 1048577ull, 8ull << 20})
    checkCopy(random, randomShape(random, row, row < (1u << 20) ? 1 : 0));
}

// Both orders of the loops, with and without incomplete tiles, incomplete lines and gaps between the rows, in a loop
// over matrices.
TEST(Copy, Transposed) {
  std::mt19937_64 random(6);
  for (uint64_t element : {1, 2, 3, 4, 8, 16, 32})
    for (int i = 0; i < 40; ++i) {
      const auto size = static_cast<int64_t>(element);
      const uint64_t lines = 1 + random() % (i % 2 ? 300 : 40), columns = 1 + random() % (i % 2 ? 300 : 40);
      int64_t sourceLine = (static_cast<int64_t>(columns) + static_cast<int64_t>(random() % 3)) * size;
      int64_t targetLine = (static_cast<int64_t>(lines) + static_cast<int64_t>(random() % 3)) * size;
      if (i % 3 == 0)
        targetLine = (targetLine + 63) / 64 * 64;
      Strided shape;
      shape.rowBytes = element;
      shape.loopCount = 3;
      shape.loops[0] = {2, sourceLine * static_cast<int64_t>(lines), targetLine * static_cast<int64_t>(columns)};
      shape.loops[1] = {lines, sourceLine, size};
      shape.loops[2] = {columns, size, targetLine};
      if (random() % 2)
        std::swap(shape.loops[1], shape.loops[2]);
      if (random() % 4 == 0)
        (shape.loops[1].targetStride == size ? shape.loops[2] : shape.loops[1]).targetStride *= -1;
      checkCopy(random, shape, i % 3 == 0 ? element * (random() % 4) : random() % 64, random() % 64);
    }
}

// Rows of a chunk; for a transposition, enough rows to fill cache lines on both sides.
TEST(Copy, ChunkRows) {
  EXPECT_EQ(chunkRows(spaced(100, 9, 0, 0), 1000), 10u);
  EXPECT_EQ(chunkRows(spaced(100, 9, 0, 0), 10), 1u);
  Strided shape;
  shape.rowBytes = 2;
  shape.loopCount = 2;
  shape.loops[0] = {500, 2000, 2};
  shape.loops[1] = {1000, 2, 1000};
  EXPECT_EQ(chunkRows(shape, 1 << 20), 16u * 32 * 1000); // 16 times 32 rows of 1000 elements: 1,024,000 bytes
  EXPECT_EQ(chunkRows(shape, 1000), 32u * 1000);
}

TEST(Copy, NegativeStrides) {
  Strided shape;
  shape.rowBytes = 2;
  shape.loopCount = 1;
  shape.loops[0] = {4, -2, 2};
  const char source[] = "aabbccdd";
  char target[8];
  copyRows({reinterpret_cast<std::byte *>(target), reinterpret_cast<const std::byte *>(source) + 6, shape, 0, 4});
  EXPECT_EQ(std::string(target, 8), "ddccbbaa");
}

TEST(Simplify, JoinsLoopsContiguousOnBothSides) {
  Strided shape;
  shape.rowBytes = 16;
  shape.loopCount = 3;
  shape.loops[0] = {3, 64, 64}; // continues the next loop: 3 x 4 rows of 16 bytes
  shape.loops[1] = {4, 16, 16};
  shape.loops[2] = {1, 999, 999};
  simplify(shape);
  EXPECT_EQ(shape.loopCount, 0u);
  EXPECT_EQ(shape.rowBytes, 3u * 4 * 16);
  shape.loopCount = 1;
  shape.loops[0] = {3, 192, 200}; // contiguous only on the source side
  simplify(shape);
  EXPECT_EQ(shape.loopCount, 1u);
}
