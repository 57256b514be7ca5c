// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/spread.h"

#include "compiler/transfer/staging.h"

#include <algorithm>
#include <map>

namespace reshard {

using namespace ir;

namespace {

constexpr int64_t kMaxRelayBytes = 512 << 20; // what a relay holds at most if there is no staging limit
constexpr int64_t kEven = 48; // relays are not used if the busiest NIC is at most 1 / kEven above the level
constexpr int64_t kLatencies =
    8; // the time gained, and a phase, must be at least so many latencies of a relayed message
// Chunks of a plan. Less than round_limits.cpp allows, because a relay leaves half of the staging limit to messages.
constexpr int64_t kMaxRelayChunks = 1 << 22;

/// The bytes that a NIC could send during the latency of a relayed message.
int64_t perLatency(const Topology &topology) {
  return static_cast<int64_t>(static_cast<__int128>(topology.nicRate) * (topology.nicLatency + topology.linkLatency) /
                              1'000'000'000);
}

/// The NICs of one node.
struct Nics {
  std::map<int64_t, std::vector<int32_t>> ranks; // by NIC
  std::vector<size_t> hops;                      // hops that may be relayed
};

} // namespace

std::vector<Relayed> spread(const std::vector<InternodeHop> &hops, const Topology &topology, int64_t world,
                            int64_t room) {
  if (topology.linkRate <= topology.nicRate || room <= 0)
    return {};
  std::map<int64_t, Nics> nodes;
  std::vector<int64_t> out(topology.nic(world - 1) + 1), in(out.size());
  for (size_t s = 0; s < hops.size(); ++s) {
    out[topology.nic(hops[s].from)] += hops[s].bytes;
    in[topology.nic(hops[s].to)] += hops[s].bytes;
    if (hops[s].first)
      nodes[topology.node(hops[s].from)].hops.push_back(s);
  }
  if (nodes.empty())
    return {};
  for (int32_t rank = 0; rank < world; ++rank)
    if (const auto node = nodes.find(topology.node(rank)); node != nodes.end())
      node->second.ranks[topology.nic(rank)].push_back(rank);
  const int64_t arriving = *std::max_element(in.begin(), in.end());
  const int64_t latency = perLatency(topology), least = std::max(latency, kStagingAlignment);
  std::vector<int64_t> left(world, room);
  std::vector<Relayed> result;
  for (auto &[number, node] : nodes) {
    int64_t sum = 0, most = 0;
    for (const auto &[nic, ranks] : node.ranks) {
      sum += out[nic];
      most = std::max(most, out[nic]);
    }
    const auto count = static_cast<int64_t>(node.ranks.size());
    const int64_t level = std::max((sum + count - 1) / count, arriving);
    if (most - level <= std::max(level / kEven, kLatencies * latency))
      continue;
    std::map<int64_t, int64_t> excess; // by NIC: bytes above what it should send itself
    for (const auto &[nic, ranks] : node.ranks)
      excess[nic] =
          out[nic] - std::max<int64_t>(level, static_cast<int64_t>(static_cast<__int128>(out[nic]) * topology.nicRate /
                                                                   (topology.nicRate + topology.linkRate)));
    auto taker = node.ranks.begin();
    for (const size_t s : node.hops) {
      int64_t &over = excess[topology.nic(hops[s].from)];
      for (int64_t bytes = hops[s].bytes; taker != node.ranks.end() && std::min(over, bytes) >= least;) {
        const std::vector<int32_t> &ranks = taker->second;
        const int32_t relay =
            *std::max_element(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) { return left[a] < left[b]; });
        const int64_t some = std::min({over, bytes, level - out[taker->first], left[relay]});
        if (some < least) { // this NIC has reached the level, or its ranks have no room left
          ++taker;
          continue;
        }
        result.push_back({s, relay, some});
        out[taker->first] += some;
        left[relay] -= some;
        over -= some;
        bytes -= some;
      }
    }
  }
  std::stable_sort(result.begin(), result.end(), [](const Relayed &a, const Relayed &b) { return a.hop < b.hop; });
  return result;
}

int64_t relayPhases(const std::vector<Relayed> &relayed, int64_t world, int64_t room) {
  std::vector<int64_t> held(world);
  for (const Relayed &each : relayed)
    held[each.relay] += each.bytes;
  return std::max<int64_t>(1, (*std::max_element(held.begin(), held.end()) + room - 1) / std::max<int64_t>(1, room));
}

int64_t relayRoom(const Layout &layout, int64_t sent) {
  if (layout.stagingLimit == 0)
    return kMaxRelayBytes;
  const int64_t half = layout.stagingLimit / 2,
                chunk = half / 8 / kStagingAlignment * kStagingAlignment; // the other half is for slots
  return chunk == 0 || sent / chunk > kMaxRelayChunks || half < kLatencies * perLatency(layout.topology)
             ? 0
             : std::min(kMaxRelayBytes, half / kStagingAlignment * kStagingAlignment);
}

} // namespace reshard
