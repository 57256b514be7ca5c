// Rounds: nothing collides, nothing is forwarded before it is there, and without relays there are as many rounds as the busiest
// port has messages.

#include "compiler/rounds.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

using namespace reshard;

namespace {

struct Ports {
  std::map<std::pair<uint32_t, int64_t>, std::set<std::pair<int32_t, int32_t>>> out, in; // (round, port) -> pairs
};

class Rounds : public ::testing::Test {
protected:
  std::mt19937_64 random_{11};
  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  /// Checks what the header promises; returns the number of rounds.
  uint32_t check(const std::vector<Stream> &streams, const ir::Topology &topology, const RoundLimits &limits, const std::vector<Grant> &grants) {
    std::vector<std::vector<int64_t>> sent;
    for (const Stream &stream : streams)
      sent.emplace_back(stream.hops.size());
    Ports far, near;
    std::map<std::tuple<uint32_t, int32_t, int32_t>, int64_t> messages;
    uint32_t rounds = 0;
    for (const Grant &grant : grants) {
      const Stream &stream = streams[grant.stream];
      const Stream::Hop &hop = stream.hops[grant.hop];
      rounds = std::max(rounds, grant.round + 1);
      EXPECT_EQ(grant.begin, sent[grant.stream][grant.hop]) << "a hop's bytes go in order";
      sent[grant.stream][grant.hop] = grant.end;
      messages[{grant.round, hop.from, hop.to}] += grant.end - grant.begin;
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      Ports &ports = local ? near : far;
      ports.out[{grant.round, local ? hop.from : topology.nic(hop.from)}].insert({hop.from, hop.to});
      ports.in[{grant.round, local ? hop.to : topology.nic(hop.to)}].insert({hop.from, hop.to});
      if (hop.after >= 0) {
        int64_t there = 0;
        for (const Grant &earlier : grants)
          if (earlier.stream == grant.stream && earlier.hop == static_cast<uint32_t>(hop.after) && earlier.round + 2 <= grant.round)
            there = std::max(there, earlier.end);
        EXPECT_LE(grant.end, there) << "sent on before it was there";
      }
    }
    for (size_t s = 0; s < streams.size(); ++s)
      for (int64_t bytes : sent[s])
        EXPECT_EQ(bytes, streams[s].bytes);
    for (const auto *side : {&far.out, &far.in})
      for (const auto &[port, pairs] : *side)
        EXPECT_EQ(pairs.size(), 1u);
    for (const auto *side : {&near.out, &near.in})
      for (const auto &[port, pairs] : *side)
        EXPECT_LE(pairs.size(), static_cast<size_t>(limits.localTurns));
    for (const auto &[key, bytes] : messages) {
      const bool local = topology.node(std::get<1>(key)) == topology.node(std::get<2>(key));
      EXPECT_LE(bytes, local ? limits.localBytes * limits.localTurns : limits.bytes);
    }
    return rounds;
  }
};

int64_t wherever(uint32_t, int64_t, int64_t to) { return to; }

TEST_F(Rounds, AreAsManyAsTheBusiestPortHasMessages) {
  for (int round = 0; round < 600; ++round) {
    const int64_t ranks = pick(2, 14);
    RoundLimits limits{1000, pick(1, 1000), 1};
    std::map<std::pair<int32_t, int32_t>, int64_t> bytes;
    for (int64_t n = pick(1, ranks * ranks); n > 0; --n) {
      const auto from = static_cast<int32_t>(pick(0, ranks - 1)), to = static_cast<int32_t>(pick(0, ranks - 1));
      if (from != to)
        bytes[{from, to}] += pick(1, 3000);
    }
    std::vector<Stream> streams;
    std::map<std::pair<int32_t, bool>, int64_t> degree;
    int64_t most = 0;
    for (const auto &[pair, sum] : bytes) {
      streams.push_back({{{pair.first, pair.second, -1}}, sum});
      for (const auto &port : {std::make_pair(pair.first, true), std::make_pair(pair.second, false)})
        most = std::max(most, degree[port] += (sum + limits.localBytes - 1) / limits.localBytes);
    }
    EXPECT_EQ(check(streams, {}, limits, dealRounds(streams, {}, limits, wherever)), most) << "round " << round;
  }
}

TEST_F(Rounds, ForwardInOrder) {
  for (int round = 0; round < 400; ++round) {
    ir::Topology topology;
    topology.ranksPerNode = pick(1, 4);
    topology.nicsPerNode = pick(1, topology.ranksPerNode);
    const RoundLimits limits{pick(1, 500), pick(1, 500), static_cast<int>(pick(1, 4))};
    std::vector<Stream> streams(pick(1, 6));
    for (Stream &stream : streams) {
      stream.bytes = pick(0, 2000);
      std::vector<int32_t> ranks(12);
      for (int32_t r = 0; r < 12; ++r)
        ranks[r] = r;
      std::shuffle(ranks.begin(), ranks.end(), random_);
      for (int64_t h = 0, hops = pick(1, 8); h < hops; ++h) {
        const auto after = static_cast<int32_t>(pick(-1, h - 1));
        stream.hops.push_back(h == 0 ? Stream::Hop{ranks[0], ranks[1], -1} : Stream::Hop{ranks[std::max(after, 0) + 1], ranks[h + 1], std::max(after, 0)});
      }
    }
    check(streams, topology, limits, dealRounds(streams, topology, limits, [&](uint32_t, int64_t from, int64_t to) { return pick(from + 1, to); }));
  }
}

TEST_F(Rounds, AChainIsAPipeline) {
  std::vector<Stream> streams = {{{{0, 1, -1}, {1, 2, 0}, {2, 3, 1}, {3, 4, 2}}, 10'000}};
  const RoundLimits limits{100, 100, 1};
  EXPECT_EQ(check(streams, {}, limits, dealRounds(streams, {}, limits, wherever)), 100u + 3 * 2);
}

} // namespace
