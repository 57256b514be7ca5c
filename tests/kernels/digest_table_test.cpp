// SPDX-License-Identifier: Apache-2.0
// Digest tables, run thread by thread as on a GPU, compared with TensorDigest: with the host code and with the GPU
// code.

#include "kernels/cpu/tensor_digest.h"
#include "kernels/gpu/copy_table.h"
#include "tests/kernels/gpu_lanes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

using namespace reshard::kernels;

namespace {

/// A table of parts of tensors, all in one memory, and the digests of the tensors.
struct Case {
  std::mt19937_64 &random;
  const std::vector<std::byte> &memory;
  DigestTable table;
  std::vector<TensorDigest> expected;

  /// Adds rows in two loops, at any alignment. In memory, the loops may be exchanged.
  void addPart(uint32_t number) {
    const uint64_t unit = uint64_t{1} << random() % 5;
    const auto gap = [&] { return static_cast<int64_t>(unit * (random() % 3)); };
    Strided shape;
    shape.rowBytes = unit * (1 + random() % (random() % 8 == 0 ? 600 : 20));
    shape.loopCount = 2;
    const auto row = static_cast<int64_t>(shape.rowBytes);
    Loop &outer = shape.loops[0], &inner = shape.loops[1];
    outer.count = 1 + random() % 3;
    inner = {1 + random() % 5, row + gap(), row + gap()};
    const auto count = static_cast<int64_t>(inner.count);
    outer.sourceStride = count * inner.sourceStride + gap();
    outer.targetStride = count * inner.targetStride + gap();
    if (random() % 4 == 0)
      std::swap(outer.sourceStride, inner.sourceStride);
    const uint64_t bytes = static_cast<uint64_t>(outer.sourceStride) * outer.count +
                           static_cast<uint64_t>(inner.sourceStride) * inner.count + shape.rowBytes;
    const std::byte *first = memory.data() + random() % (memory.size() - bytes);
    const uint64_t position = random() % 20'000 * (random() % 2 ? 1 : unit);
    table.add(number, position, reinterpret_cast<uint64_t>(first), shape);
    for (int64_t o = 0; o < static_cast<int64_t>(outer.count); ++o)
      for (int64_t i = 0; i < count; ++i)
        expected[number].add(first + o * outer.sourceStride + i * inner.sourceStride, 1, 1,
                             position + static_cast<uint64_t>(o * outer.targetStride + i * inner.targetStride),
                             shape.rowBytes);
  }
};

/// run(view, blocks) adds all digests of a table.
template <class Run> void expectEqualDigests(uint64_t seed, int cases, Run run) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> memory(1 << 20);
  for (std::byte &byte : memory)
    byte = static_cast<std::byte>(random());
  for (int c = 0; c < cases; ++c) {
    Case all{random, memory, {}, std::vector<TensorDigest>(1 + random() % 4)};
    for (uint64_t parts = 1 + random() % 12; parts > 0; --parts)
      all.addPart(static_cast<uint32_t>(random() % all.expected.size()));
    std::vector<uint64_t> sums(2 * all.expected.size());
    run(all.table.view(sums.data()), static_cast<uint32_t>(1 + random() % 9));
    for (size_t t = 0; t < all.expected.size(); ++t) {
      EXPECT_EQ(sums[2 * t], all.expected[t].sums[0]) << "case " << c << ", tensor " << t;
      ASSERT_EQ(sums[2 * t + 1], all.expected[t].sums[1]) << "case " << c << ", tensor " << t;
    }
  }
}

} // namespace

TEST(DigestTable, ThreadsAddEveryByteOnce) {
  expectEqualDigests(1, std::getenv("RESHARD_FULL") ? 5000 : 300, [](const DigestTableView &view, uint32_t blocks) {
    for (uint32_t block = blocks; block-- > 0;)
      for (uint32_t thread = 0; thread < kBlockThreads; ++thread)
        digestThread(view, block, blocks, thread);
  });
}

TEST(DigestTable, GpuCodeAddsTheSameWithAlignedAccesses) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not support the coroutines that run the lanes";
#endif
  expectEqualDigests(2, std::getenv("RESHARD_FULL") ? 2000 : 150, [](const DigestTableView &view, uint32_t blocks) {
    for (uint32_t block = blocks; block-- > 0;)
      for (uint32_t warp = 0; warp < kBlockThreads / kWarpThreads; ++warp)
        ASSERT_EQ(reshard::tests::digestWarpOfLanes(view, block, blocks, warp), "");
  });
}
