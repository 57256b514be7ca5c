// SPDX-License-Identifier: Apache-2.0
// Tests of roundLimits without a staging limit: sizes of chunks that suit the bytes of the pairs, and the rounds of a
// chunk between nodes.

#include "compiler/schedule/message_plan.h"
#include "compiler/transfer/staging.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

constexpr int32_t kSide = 64;
/// Smaller chunks than half of this cannot keep a NIC of 50 GB/s and 8 us busy.
constexpr int64_t kMinBytes = 832'512;

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
    const int64_t best = std::max(
        bestChunkBytes(bytes * kSide, kSide, 0, layout.topology.nicRate, layout.topology.nicLatency), kMinBytes);
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

/// The chunks of a port, each of which the other ports wait for as if it were whole.
TEST(RoundLimits, ChunksOfAFewPairsFillTheLastRoundToo) {
  const int64_t bytes = 22'380'544;
  std::vector<Flow> flows;
  for (int32_t to = 0; to < 6; ++to)
    flows.push_back({{{0, kSide + to, -1}}, bytes});
  const int64_t size = cantFail(roundLimits(flows, cluster(18), 0)).internodeBytes;
  EXPECT_LE((bytes + size - 1) / size * size - bytes, bytes / 50);
}

/// A chunk takes its own time and that of the next one at each hop.
TEST(RoundLimits, LongRoutesAreShortPipelines) {
  for (const int64_t bytes : {400'000'000ll, 4'000'000'000ll, 40'000'000'000ll})
    for (const int32_t hops : {2, 4, 12}) {
      SCOPED_TRACE(hops);
      ir::Layout layout = cluster(18);
      layout.topology.ranksPerNode = layout.topology.nicsPerNode = 1;
      Flow flow{{}, bytes};
      for (int32_t h = 0; h < hops; ++h)
        flow.hops.push_back({h, h + 1, h - 1});
      const int64_t size = cantFail(roundLimits({flow}, layout, 0)).internodeBytes;
      EXPECT_GE(size, kMinBytes / 2);
      EXPECT_LE(size, std::max(kMinBytes, bytes / 64 / (2 * (hops - 1))));
    }
}

/// A message has two slots. While a chunk is sent, arrives and is copied, the other one is sent.
TEST(RoundLimits, LinksThatAreTheLimitAreBusyAllTheTime) {
  for (const int64_t links : {9, 18, 36}) {
    SCOPED_TRACE(links);
    ir::Layout layout = cluster(links);
    layout.topology.copyRate = 3'200'000'000'000;
    const RoundLimits limits = cantFail(roundLimits(allToAll(1 << 20, 2 * static_cast<int32_t>(links)), layout, 0));
    const double sent = static_cast<double>(limits.intranodeBytes) / static_cast<double>(layout.topology.linkRate),
                 copied = static_cast<double>(limits.intranodeBytes) / static_cast<double>(layout.topology.copyRate);
    EXPECT_GE(2 * sent * 1.001, sent + 3e-6 + copied);
    // The rounds of both tiers take about the same time.
    const double between = static_cast<double>(limits.internodeBytes) / static_cast<double>(layout.topology.nicRate);
    EXPECT_LE(limits.internodeRounds * sent, between * 1.001);
    EXPECT_GE((limits.internodeRounds + 1) * sent, between * 0.999);
  }
}

/// A rank that has a shared NIC to itself can use all of its rate.
TEST(RoundLimits, ARankCanBeBusyOnASharedNic) {
  ir::Layout layout = cluster(18);
  layout.topology.nicsPerNode = 1;
  layout.topology.nicRate = 400'000'000'000;
  const auto size = [&](std::vector<Flow> flows) { return cantFail(roundLimits(flows, layout, 0)).internodeBytes; };
  const std::vector<Flow> one = {{{{0, kSide, -1}}, 20'000'000}};
  std::vector<Flow> all;
  for (int32_t from = 0; from < kSide; ++from)
    all.push_back({{{from, kSide + from, -1}}, 20'000'000});
  EXPECT_GE(size(one), 400'000 * 8);
  EXPECT_LE(size(all), 400'000 * 8 / 2);
}

TEST(RoundLimits, LinksHaveRoomIfTheyAreFast) {
  const auto rounds = [](int64_t links, int32_t hops, int64_t bytes = 400'000'000) {
    return cantFail(roundLimits(allToAll(bytes, hops), cluster(links), 0)).internodeRounds;
  };
  EXPECT_EQ(rounds(18, 2), 4u);
  EXPECT_EQ(rounds(18, 7), 14u);
  EXPECT_EQ(rounds(10, 7), 10u);
  EXPECT_EQ(rounds(2, 7), 2u) << "links that are slower than the rounds need: a round takes as long as a link's chunk";
  EXPECT_EQ(rounds(18, 12), 16u);
  EXPECT_EQ(rounds(100, 7, 40'000'000'000), 14u) << "bytes times rate exceed 64 bits";
}

} // namespace
