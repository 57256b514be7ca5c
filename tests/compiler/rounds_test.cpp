// SPDX-License-Identifier: Apache-2.0
// Tests of assignRounds: no port has two chunks at a time, no byte is forwarded before it arrived, and without relays
// the number of rounds is that of the chunks of the busiest port.

#include "compiler/schedule/rounds.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

using namespace reshard;

namespace {

/// Allows cuts at all positions.
class AnyCuts : public Cuts {
public:
  bool possible(uint32_t, int64_t) const override { return true; }
  int64_t best(uint32_t, int64_t, int64_t to) const override { return to; }
};
/// Allows two of three positions, and chooses a random one.
class RandomCuts : public Cuts {
public:
  explicit RandomCuts(uint64_t seed) : random_(seed) {}
  bool possible(uint32_t, int64_t at) const override { return at % 3 != 0; }
  int64_t best(uint32_t, int64_t from, int64_t to) const override {
    return std::uniform_int_distribution<int64_t>(from, to)(random_);
  }

private:
  mutable std::mt19937_64 random_;
};

class Rounds : public ::testing::Test {
protected:
  std::mt19937_64 random_{11};
  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  /// Checks each chunk against the promises of rounds.h; returns the number of rounds.
  uint32_t check(const std::vector<Flow> &flows, const ir::Topology &topology, const RoundLimits &limits,
                 const std::vector<Message> &messages) {
    std::map<std::pair<uint32_t, uint32_t>, std::map<int64_t, uint32_t>>
        arrived; // by flow and hop: end of a chunk's bytes -> the first round in which they may be forwarded
    std::vector<std::vector<int64_t>> sent;
    for (const Flow &flow : flows)
      sent.emplace_back(flow.hops.size());
    std::map<std::tuple<uint32_t, bool, bool, int32_t>, int> busy; // (round, local, sends, rank) -> chunks
    struct Part {
      uint32_t round, flow, hop;
      int64_t begin, end;
    };
    std::vector<Part> parts;
    uint32_t rounds = 0;
    for (const Message &message : messages) {
      const bool local = topology.node(message.from) == topology.node(message.to);
      const int64_t most = local ? limits.intranodeBytes : limits.internodeBytes;
      const uint32_t each = local ? 1 : limits.internodeRounds;
      EXPECT_TRUE(message.bytes > 0 &&
                  (message.chunk == 0 ? message.bytes <= most : message.chunk <= most && message.bytes > most));
      const int64_t chunk = message.chunk > 0 ? message.chunk : message.bytes;
      EXPECT_EQ(message.chunk % 256, 0);
      const auto chunks = static_cast<uint32_t>((message.bytes + chunk - 1) / chunk);
      EXPECT_EQ(chunks, (message.bytes + most - 1) / most);
      EXPECT_EQ(message.rounds, chunks * each);
      EXPECT_EQ(message.round % each, 0u);
      rounds = std::max(rounds, message.round + message.rounds);
      for (uint32_t c = 0; c < chunks; ++c)
        for (uint32_t r = message.round + c * each; r < message.round + (c + 1) * each; ++r) {
          EXPECT_EQ((++busy[{r, local, true, message.from}]), 1);
          EXPECT_EQ((++busy[{r, local, false, message.to}]), 1);
        }
      int64_t at = 0;
      for (const Grant &grant : message.grants) {
        const Flow::Hop &hop = flows[grant.flow].hops[grant.hop];
        EXPECT_TRUE(hop.from == message.from && hop.to == message.to && grant.begin < grant.end);
        EXPECT_EQ(grant.begin, sent[grant.flow][grant.hop]) << "a hop sends its bytes in order";
        sent[grant.flow][grant.hop] = grant.end;
        for (int64_t begin = grant.begin; begin < grant.end;) {
          const auto c = static_cast<uint32_t>(at / chunk);
          const int64_t end = std::min(grant.end, begin + (c + 1) * chunk - at);
          parts.push_back({message.round + c * each, grant.flow, grant.hop, begin, end});
          arrived[{grant.flow, grant.hop}][end] = message.round + (c + 2) * each;
          at += end - begin;
          begin = end;
        }
      }
      EXPECT_EQ(at, message.bytes);
    }
    for (const Part &part : parts)
      if (const int32_t after = flows[part.flow].hops[part.hop].after; after >= 0) {
        const auto &ends = arrived[{part.flow, static_cast<uint32_t>(after)}];
        const auto chunk = ends.lower_bound(part.end);
        EXPECT_TRUE(chunk != ends.end() && chunk->second <= part.round) << "forwarded before it arrived";
      }
    for (size_t s = 0; s < flows.size(); ++s)
      for (int64_t bytes : sent[s])
        EXPECT_EQ(bytes, flows[s].bytes);
    return rounds;
  }
};

TEST_F(Rounds, AreAsManyAsTheBusiestPortHasChunks) {
  for (int round = 0; round < 600; ++round) {
    const int64_t ranks = pick(2, 14);
    RoundLimits limits{1024, 256 * pick(1, 4), 1};
    std::map<std::pair<int32_t, int32_t>, int64_t> bytes;
    for (int64_t n = pick(1, ranks * ranks); n > 0; --n) {
      const auto from = static_cast<int32_t>(pick(0, ranks - 1)), to = static_cast<int32_t>(pick(0, ranks - 1));
      if (from != to)
        bytes[{from, to}] += pick(1, 4000);
    }
    std::vector<Flow> flows;
    std::map<std::pair<int32_t, bool>, int64_t> degree;
    int64_t most = 0;
    for (const auto &[pair, sum] : bytes) {
      flows.push_back({{{pair.first, pair.second, -1}}, sum});
      for (const auto &port : {std::make_pair(pair.first, true), std::make_pair(pair.second, false)})
        most = std::max(most, degree[port] += (sum + limits.intranodeBytes - 1) / limits.intranodeBytes);
    }
    EXPECT_EQ(check(flows, {}, limits, assignRounds(flows, {}, limits, AnyCuts())), most) << "round " << round;
  }
}

/// So many pairs of a port are found by DensePairs.
TEST_F(Rounds, AreAsManyAsChunksIfAllSendToAll) {
  const RoundLimits limits{256, 256, 1};
  constexpr int32_t kSide = 100;
  std::vector<Flow> flows;
  std::map<std::pair<int32_t, bool>, int64_t> degree;
  int64_t most = 0;
  for (int32_t from = 0; from < kSide; ++from)
    for (int32_t to = kSide; to < 2 * kSide; ++to) {
      const int64_t bytes = pick(1, 2000);
      flows.push_back({{{from, to, -1}}, bytes});
      for (const auto &port : {std::make_pair(from, true), std::make_pair(to, false)})
        most = std::max(most, degree[port] += (bytes + limits.intranodeBytes - 1) / limits.intranodeBytes);
    }
  const std::vector<Message> messages = assignRounds(flows, {}, limits, AnyCuts());
  EXPECT_EQ(check(flows, {}, limits, messages), most);
  EXPECT_LE(messages.size(), flows.size() * 21 / 20);
}

TEST_F(Rounds, ForwardInOrder) {
  for (int round = 0; round < 400; ++round) {
    ir::Topology topology;
    topology.ranksPerNode = pick(1, 4);
    topology.nicsPerNode = pick(1, topology.ranksPerNode);
    const RoundLimits limits{256 * pick(1, 3), 256 * pick(1, 3), static_cast<uint32_t>(pick(1, 4))};
    std::vector<Flow> flows(pick(1, 6));
    for (Flow &flow : flows) {
      flow.bytes = pick(0, 5000);
      std::vector<int32_t> ranks(12);
      for (int32_t r = 0; r < 12; ++r)
        ranks[r] = r;
      std::shuffle(ranks.begin(), ranks.end(), random_);
      for (int64_t h = 0, hops = pick(1, 8); h < hops; ++h) {
        const auto after = static_cast<int32_t>(pick(-1, h - 1));
        flow.hops.push_back(h == 0 ? Flow::Hop{ranks[0], ranks[1], -1}
                                   : Flow::Hop{ranks[std::max(after, 0) + 1], ranks[h + 1], std::max(after, 0)});
      }
    }
    check(flows, topology, limits, assignRounds(flows, topology, limits, RandomCuts(round)));
  }
}

/// A rank that receives flows from another node and forwards each to the other ranks of its node.
TEST_F(Rounds, ForwardEarlyFlowsAsAWhole) {
  ir::Topology topology;
  topology.ranksPerNode = 8;
  const RoundLimits limits{1024, 1024, 14};
  std::vector<Flow> flows(32);
  for (Flow &flow : flows) {
    flow.bytes = 64 * 1024;
    flow.hops.push_back({0, 8, -1});
    for (int32_t to = 9; to < 16; ++to)
      flow.hops.push_back({8, to, 0});
  }
  const std::vector<Message> messages = assignRounds(flows, topology, limits, AnyCuts());
  // The last chunk arrives in the last of 32 * 64 * 14 rounds; what waits for it is a small part of the last flow.
  EXPECT_LE(check(flows, topology, limits, messages), 32u * 64 * 14 + 14 + 7 * 64 / 8 + 7);
  std::map<uint32_t, size_t> parts; // of the hops inside the node, by flow
  for (const Message &message : messages)
    for (const Grant &grant : message.grants)
      parts[grant.flow] += grant.hop > 0;
  EXPECT_EQ(parts[0], 7u);
  EXPECT_EQ(parts[23], 7u);
  EXPECT_GE(parts[31], 7u * 4);
}

TEST_F(Rounds, AChainIsAPipeline) {
  std::vector<Flow> flows = {{{{0, 1, -1}, {1, 2, 0}, {2, 3, 1}, {3, 4, 2}}, 25'600}};
  const RoundLimits limits{256, 256, 1};
  EXPECT_EQ(check(flows, {}, limits, assignRounds(flows, {}, limits, AnyCuts())), 100u + 3 * 2);
}

} // namespace
