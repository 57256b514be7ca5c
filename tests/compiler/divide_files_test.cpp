// SPDX-License-Identifier: Apache-2.0
// Copies from files to files are shared out: every byte once, in order, to ranks with about the same bytes.

#include "compiler/schedule/flows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// A byte of a descriptor: instance and offset on both sides.
using Byte = std::tuple<uint32_t, int64_t, uint32_t, int64_t>;

void appendBytes(Descriptor d, const Shape &shape, size_t loop, std::vector<Byte> &bytes) {
  if (loop == shape.loops.size()) {
    for (int64_t b = 0; b < shape.rowBytes; ++b)
      bytes.emplace_back(d.sourceInstance, d.sourceOffset + b, d.targetInstance, d.targetOffset + b);
    return;
  }
  for (int64_t i = 0; i < shape.loops[loop].count; ++i)
    appendBytes(stepped(d, i, shape.loops[loop], d.shape), shape, loop + 1, bytes);
}

TEST(DivideFiles, EveryByteOnceInOrder) {
  std::mt19937_64 random(11);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (int round = 0; round < 200; ++round) {
    Interner<Shape> shapes;
    std::vector<Descriptor> descriptors;
    std::vector<Byte> expected;
    int64_t longest = 0;
    for (int64_t n = 1 + below(4); n > 0; --n) {
      Shape shape{1 + below(40), {}};
      for (int64_t loops = below(3); loops > 0; --loops)
        shape.loops.push_back({2 + below(8), 100 * below(50), 100 * below(50), below(2), below(3)});
      longest = std::max(longest, shape.rowBytes);
      Descriptor d;
      d.sourceOffset = below(1000);
      d.targetOffset = below(1000);
      d.shape = shapes.intern(shape);
      descriptors.push_back(d);
      appendBytes(d, shape, 0, expected);
    }
    const int64_t world = 1 + below(6);
    std::vector<LocalDescriptor> local;
    divideFiles(descriptors, world, shapes, [](const Descriptor &) { return 4096; }, local);
    std::vector<Byte> found;
    std::vector<int64_t> share(static_cast<size_t>(world));
    int32_t last = 0;
    for (const auto &[d, rank] : local) {
      EXPECT_GE(rank, last);
      last = rank;
      ASSERT_LT(rank, world);
      share[static_cast<size_t>(rank)] += bytesOf(shapes[d.shape]);
      appendBytes(d, shapes[d.shape], 0, found);
    }
    EXPECT_EQ(found, expected);
    for (const int64_t bytes : share)
      EXPECT_LE(std::abs(bytes - static_cast<int64_t>(expected.size()) / world), longest + 1);
  }
}

TEST(DivideFiles, LongRowsAreCutAtWholeGranules) {
  Interner<Shape> shapes;
  Descriptor d;
  d.shape = shapes.intern({10'000'000, {}});
  std::vector<LocalDescriptor> local;
  divideFiles({d}, 3, shapes, [](const Descriptor &) { return 12'288; }, local);
  ASSERT_EQ(local.size(), 3u);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(local[rank].rank, static_cast<int32_t>(rank));
    EXPECT_EQ(local[rank].descriptor.targetOffset % 12'288, 0);
    EXPECT_NEAR(static_cast<double>(bytesOf(shapes[local[rank].descriptor.shape])), 10e6 / 3, 2 * 12'288);
  }
}

} // namespace
