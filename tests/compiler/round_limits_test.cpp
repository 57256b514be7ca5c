// SPDX-License-Identifier: Apache-2.0
// Tests of roundLimits without a staging limit: sizes of chunks that suit the bytes of the pairs, and the rounds of a
// chunk between nodes.

#include "compiler/schedule/message_plan.h"
#include "compiler/transfer/staging.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

constexpr int32_t kSide = 64;

/// Two nodes with NICs of 50 GB/s and links that are `links` times as fast.
ir::Layout cluster(int64_t links) {
  ir::Layout layout;
  layout.world = 2 * kSide;
  layout.topology.ranksPerNode = kSide;
  layout.topology.nicsPerNode = kSide;
  layout.topology.nicRate = 50'000'000'000;
  layout.topology.nicLatency = 8'000;
  layout.topology.linkRate = links * layout.topology.nicRate;
  layout.topology.linkLatency = 3'000;
  return layout;
}

/// Every rank of one node sends `bytes` to every rank of the other, each of which forwards them to `hops` ranks.
std::vector<Flow> allToAll(int64_t bytes, int32_t hops = 0) {
  std::vector<Flow> flows;
  for (int32_t from = 0; from < kSide; ++from)
    for (int32_t to = kSide; to < 2 * kSide; ++to) {
      Flow flow{{{from, to, -1}}, bytes};
      for (int32_t h = 1; h <= hops; ++h)
        flow.hops.push_back({to, kSide + (to + h) % kSide, 0});
      flows.push_back(flow);
    }
  return flows;
}

TEST(RoundLimits, ChunksFillTheLastRoundOfEachPair) {
  const ir::Layout layout = cluster(18);
  for (int64_t tenths = 21; tenths < 200; ++tenths) {
    SCOPED_TRACE(tenths);
    // With p partners, the best chunk is sqrt(2 * rate * latency * bytes of a pair): a pair of 2 * k^2 * rate * latency
    // bytes has k chunks.
    const int64_t bytes = 2 * 400'000 * tenths * tenths / 100;
    const int64_t best = bestChunkBytes(bytes * kSide, kSide, 0, layout.topology.nicRate, layout.topology.nicLatency);
    const RoundLimits limits = cantFail(roundLimits(allToAll(bytes), layout, 0));
    const int64_t size = limits.internodeBytes;
    EXPECT_GE(size, best / 2);
    EXPECT_LE(size, best);
    EXPECT_EQ(size % 256, 0);
    EXPECT_EQ(limits.internodeRounds, 1u);
    const int64_t unused = (bytes + size - 1) / size * size - bytes;
    EXPECT_LE(unused, bytes / 50) << "of " << bytes << " bytes in chunks of " << size << ", best " << best;
  }
}

TEST(RoundLimits, ChunksOfFewPairsHaveTheBestSize) {
  const ir::Layout layout = cluster(18);
  const int64_t bytes = 17'300'000'000;
  const RoundLimits limits = cantFail(roundLimits({{{{0, kSide, -1}}, bytes}}, layout, 0));
  EXPECT_EQ(limits.internodeBytes, bestChunkBytes(bytes, 1, 0, layout.topology.nicRate, layout.topology.nicLatency));
}

TEST(RoundLimits, LinksHaveRoomIfTheyAreFast) {
  const auto rounds = [](int64_t links, int32_t hops, int64_t bytes = 400'000'000) {
    return cantFail(roundLimits(allToAll(bytes, hops), cluster(links), 0)).internodeRounds;
  };
  EXPECT_EQ(rounds(18, 2), 4u);
  EXPECT_EQ(rounds(18, 7), 14u);
  EXPECT_EQ(rounds(10, 7), 10u);
  EXPECT_EQ(rounds(2, 7), 7u) << "links that are slower than the rounds need";
  EXPECT_EQ(rounds(18, 12), 16u);
  EXPECT_EQ(rounds(100, 7, 40'000'000'000), 14u) << "bytes times rate exceed 64 bits";
}

} // namespace
