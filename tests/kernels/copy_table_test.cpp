// SPDX-License-Identifier: Apache-2.0
// Copy tables, run thread by thread as on a GPU, compared with a loop over bytes: with the host code and with the GPU
// code.

#include "kernels/gpu/copy_table.h"
#include "tests/kernels/gpu_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

using namespace reshard::kernels;

namespace {

constexpr size_t kGuard = 64;

/// Returns the offset of byte `number` of a shape on one side.
int64_t addressOf(const Strided &shape, uint64_t number, bool target) {
  auto at = static_cast<int64_t>(number % shape.rowBytes);
  uint64_t row = number / shape.rowBytes;
  for (size_t l = shape.loopCount; l-- > 0; row /= shape.loops[l].count)
    at += static_cast<int64_t>(row % shape.loops[l].count) *
          (target ? shape.loops[l].targetStride : shape.loops[l].sourceStride);
  return at;
}

/// Lays out one side of a shape: the loops nest in random order, with gaps that are multiples of `unit` bytes, and may
/// run backwards. Returns the offset of the first row, and the extent in bytes.
std::pair<int64_t, int64_t> randomSide(std::mt19937_64 &random, Strided &shape, bool target, uint64_t unit) {
  std::vector<size_t> order(shape.loopCount);
  for (size_t l = 0; l < order.size(); ++l)
    order[l] = l;
  std::shuffle(order.begin(), order.end(), random);
  auto next = static_cast<int64_t>((shape.rowBytes + unit - 1) / unit * unit + random() % 3 * unit);
  int64_t low = 0;
  for (const size_t l : order) {
    const bool backwards = random() % 4 == 0;
    const int64_t stride = backwards ? -next : next;
    (target ? shape.loops[l].targetStride : shape.loops[l].sourceStride) = stride;
    low += backwards ? stride * static_cast<int64_t>(shape.loops[l].count - 1) : 0;
    next = next * static_cast<int64_t>(shape.loops[l].count) + static_cast<int64_t>(random() % 2 * unit);
  }
  return {-low, next};
}

/// A table, the memory that it copies, and the expected result.
struct Case {
  explicit Case(uint64_t maxUnits) : table(maxUnits) {}
  CopyTable table;
  std::vector<unsigned char> source, target, expected;
};

void fillCase(std::mt19937_64 &random, Case &all, int entries, uint64_t maxRow) {
  struct Job {
    Strided shape;
    uint64_t source, target, first, bytes; // source and target: offsets of the shape's first row
    bool zeros;
  };
  std::vector<Job> jobs;
  uint64_t sourceEnd = kGuard, targetEnd = kGuard;
  for (int p = 0; p < entries; ++p) {
    const uint64_t unit = uint64_t{1} << random() % 5;
    Job job{};
    job.shape.rowBytes =
        std::max<uint64_t>(1, random() % maxRow / unit * unit + (random() % 3 == 0 ? random() % 16 : unit));
    job.shape.loopCount = random() % 4;
    for (size_t l = 0; l < job.shape.loopCount; ++l)
      job.shape.loops[l].count = 1 + random() % 6;
    const auto [sourceFirst, sourceBytes] = randomSide(random, job.shape, false, unit);
    const auto [targetFirst, targetBytes] = randomSide(random, job.shape, true, unit);
    sourceEnd = (sourceEnd + 15) / 16 * 16 + random() % 3 * unit;
    targetEnd = random() % 2 ? (targetEnd + 15) / 16 * 16 + sourceEnd % 16 // the same misalignment as the source
                             : targetEnd + random() % 3 * unit;
    job.source = sourceEnd + static_cast<uint64_t>(sourceFirst);
    job.target = targetEnd + static_cast<uint64_t>(targetFirst);
    sourceEnd += static_cast<uint64_t>(sourceBytes);
    targetEnd += static_cast<uint64_t>(targetBytes);
    job.first = random() % 3 == 0 ? random() % job.shape.bytes() : 0;
    job.bytes = random() % 3 == 0 ? 1 + random() % (job.shape.bytes() - job.first) : job.shape.bytes() - job.first;
    job.zeros = random() % 8 == 0;
    jobs.push_back(job);
  }
  all.source.resize(sourceEnd + kGuard);
  all.target.assign(targetEnd + kGuard, 0xEE);
  for (unsigned char &byte : all.source)
    byte = static_cast<unsigned char>(random() % 0xEE);
  all.expected = all.target;
  uint64_t bytes = 0;
  for (const Job &job : jobs) {
    for (uint64_t b = job.first; b < job.first + job.bytes; ++b)
      all.expected[job.target + static_cast<uint64_t>(addressOf(job.shape, b, true))] =
          job.zeros ? 0 : all.source[job.source + static_cast<uint64_t>(addressOf(job.shape, b, false))];
    all.table.add(reinterpret_cast<uint64_t>(all.target.data() + job.target),
                  job.zeros ? 0 : reinterpret_cast<uint64_t>(all.source.data() + job.source), job.shape, job.first,
                  job.bytes);
    bytes += job.bytes;
  }
  ASSERT_EQ(all.table.bytes(), bytes);
}

} // namespace

TEST(CopyTable, ThreadsCopyExactlyTheGivenBytes) {
  std::mt19937_64 random(1);
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  for (int i = 0; i < cases; ++i) {
    Case all(i % 3 == 0 ? 2 + random() % 50 : uint64_t{1} << 31);
    fillCase(random, all, 1 + static_cast<int>(random() % 40), i % 5 == 0 ? 4000 : 90);
    const CopyTableView view = all.table.view();
    const auto blocks = static_cast<uint32_t>(1 + random() % 9);
    for (uint32_t block = blocks; block-- > 0;)
      for (uint32_t thread = 0; thread < kBlockThreads; ++thread)
        copyThread(view, block, blocks, thread);
    ASSERT_TRUE(all.target == all.expected) << "case " << i;
  }
}

TEST(CopyTable, GpuCodeCopiesTheSameWithAlignedAccesses) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not support the coroutines that run the lanes";
#endif
  std::mt19937_64 random(3);
  const int cases = std::getenv("RESHARD_FULL") ? 5000 : 500;
  for (int i = 0; i < cases; ++i) {
    Case all(i % 3 == 0 ? 2 + random() % 50 : uint64_t{1} << 31);
    fillCase(random, all, 1 + static_cast<int>(random() % 40), i % 5 == 0 ? 4000 : 90);
    const auto blocks = static_cast<uint32_t>(1 + random() % 9);
    for (uint32_t block = blocks; block-- > 0;)
      for (uint32_t warp = 0; warp < kBlockThreads / kWarpThreads; ++warp)
        ASSERT_EQ(reshard::tests::copyWarpOfLanes(all.table.view(), block, blocks, warp), "") << "case " << i;
    ASSERT_TRUE(all.target == all.expected) << "case " << i;
  }
}

TEST(CopyTable, EachByteIsCopiedByOneThread) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 20; ++i) {
    Case all(uint64_t{1} << 31);
    fillCase(random, all, 1 + i, 300);
    const CopyTableView view = all.table.view();
    const std::vector<unsigned char> before = all.target;
    uint64_t written = 0;
    for (uint32_t block = 0; block < 3; ++block)
      for (uint32_t thread = 0; thread < kBlockThreads; ++thread) {
        copyThread(view, block, 3, thread);
        for (size_t b = 0; b < before.size(); ++b)
          written += all.target[b] != before[b];
        all.target = before;
      }
    ASSERT_EQ(written, all.table.bytes()) << "case " << i;
  }
}

TEST(CopyTable, BlocksGetEqualWorkOfOneLargeAndManySmallEntries) {
  Strided huge, small;
  huge.rowBytes = 3 << 20;
  small.rowBytes = 24;
  CopyTable table;
  uint64_t at = 1 << 20;
  table.add(at, at, huge);
  for (int i = 0; i < 50'000; ++i, at += 4096)
    table.add(at, at, small);
  const CopyTableView view = table.view();
  EXPECT_EQ(view.slots, (3u << 20) / 16 + 50'000 * 2);
  constexpr uint32_t kBlocks = 132;
  for (uint32_t block = 0; block < kBlocks; ++block) {
    const uint64_t blockSlots = firstSlot(view.slots, block + 1, kBlocks) - firstSlot(view.slots, block, kBlocks);
    EXPECT_NEAR(static_cast<double>(blockSlots), static_cast<double>(view.slots) / kBlocks, 2 * kTileSlots) << block;
  }
  EXPECT_EQ(firstSlot(view.slots, kBlocks, kBlocks), view.slots);
}

TEST(CopyTable, AccessesAreAsWideAsAlignmentAllows) {
  auto widths = [](uint64_t target, uint64_t source, Strided shape, uint64_t first = 0, uint64_t bytes = 0) {
    CopyTable table;
    table.add(target, source, shape, first, bytes ? bytes : shape.bytes());
    std::vector<std::pair<uint32_t, uint64_t>> result;
    for (uint32_t p = 0; p < table.view().entryCount; ++p)
      result.emplace_back(table.view().entries[p].width,
                          uint64_t{table.view().entries[p].units} * table.view().entries[p].width);
    return result;
  };
  using Widths = std::vector<std::pair<uint32_t, uint64_t>>;
  Strided rows;
  rows.rowBytes = 4096;
  rows.loopCount = 1;
  rows.loops[0] = {4, 8192, 5120};
  EXPECT_EQ(widths(0x1000, 0x8000, rows), (Widths{{16, 4 * 4096}}));
  EXPECT_EQ(widths(0x1008, 0x8000, rows), (Widths{{8, 4 * 4096}}));                           // different misalignment
  EXPECT_EQ(widths(0x1002, 0x8002, rows), (Widths{{2, 4 * 14}, {16, 4 * 4080}, {2, 4 * 2}})); // same: head, body, tail
  EXPECT_EQ(widths(0x1000, 0x8000, rows, 4096 + 4, 100), (Widths{{4, 100}}));                 // a part of one row
  EXPECT_EQ(widths(0x1008, 0, rows), (Widths{{8, 4 * 8}, {16, 4 * 4080}, {8, 4 * 8}}));       // zeros
  rows.loops[0].targetStride = 4098;
  EXPECT_EQ(widths(0x1000, 0x8000, rows), (Widths{{2, 4 * 4096}}));
  Strided line;
  line.rowBytes = 1 << 20;
  EXPECT_EQ(widths(0x1000, 0x8000, line, 10, 1000), (Widths{{2, 6}, {16, 992}, {2, 2}}));
}
