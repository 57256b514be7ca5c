// SPDX-License-Identifier: Apache-2.0
// Sends bytes through other ranks of a node where the own NIC is overloaded: which flows are cut, between which relays,
// and where the bytes lie in the arenas of the relays.
#include "compiler/schedule/flows.h"

#include "compiler/schedule/flow_descriptors.h"
#include "compiler/transfer/staging.h"

#include <algorithm>
#include <map>

namespace reshard {

using namespace ir;

namespace {

/// With more phases the cost of additional messages exceeds the gain of relays.
constexpr int64_t kMaxRelayPhases = 64;
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

/// Bytes that a rank sends to a rank of another node. Bytes that it only forwards cannot be relayed.
struct InternodeHop {
  int32_t from = 0, to = 0; // world ranks
  int64_t bytes = 0;
  bool first = true; // this is the first hop of the flow: its bytes may be relayed
};

/// Bytes of a hop that a relay, another rank of the sender's node, sends instead of the sender.
struct Relayed {
  size_t hop = 0;    // index into the list of hops
  int32_t relay = 0; // world rank
  int64_t bytes = 0;
};

/// The bytes to relay so that the NICs of each node are evenly loaded. It relays no more than is useful: NICs need not
/// be faster than the busiest receiving NIC, and links inside the node must bring the bytes in time. No rank relays
/// more than `room` bytes. `world`: the number of world ranks. Ordered by hop.
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

/// The number of phases into which relayed bytes are divided so that a relay holds about `room` bytes at a time.
int64_t relayPhases(const std::vector<Relayed> &relayed, int64_t world, int64_t room) {
  std::vector<int64_t> held(world);
  for (const Relayed &each : relayed)
    held[each.relay] += each.bytes;
  return std::max<int64_t>(1, (*std::max_element(held.begin(), held.end()) + room - 1) / std::max<int64_t>(1, room));
}

/// The bytes that a relay may hold at a time; its arena also needs slots for `sent` bytes of messages of the whole
/// plan. 0: the staging limit is too small for relays.
int64_t relayRoom(const Layout &layout, int64_t sent) {
  if (layout.stagingLimit == 0)
    return kMaxRelayBytes;
  const int64_t half = layout.stagingLimit / 2,
                chunk = half / 8 / kStagingAlignment * kStagingAlignment; // the other half is for slots
  return chunk == 0 || sent / chunk > kMaxRelayChunks || half < kLatencies * perLatency(layout.topology)
             ? 0
             : std::min(kMaxRelayBytes, half / kStagingAlignment * kStagingAlignment);
}

} // namespace

std::vector<std::pair<FlowKey, Descriptor>> Relays::cut(const std::vector<FlowKey> &keys,
                                                        const std::vector<Flow> &flows,
                                                        const std::vector<size_t> &firsts,
                                                        const std::vector<Descriptor> &descriptors) {
  for (const Endpoint &endpoint : layout_.endpoints)
    for (const Param &param : endpoint.params)
      if (param.view)
        return {};
  int64_t sent = 0;
  for (const Flow &flow : flows)
    sent += flow.bytes * static_cast<int64_t>(flow.hops.size());
  const int64_t room = relayRoom(layout_, sent);
  std::vector<Split> split(flows.size());
  std::vector<int64_t> phases(flows.size(), 1);
  bool any = false;
  for (size_t first = 0, last = 0; first < flows.size(); first = last) { // epoch after epoch
    std::vector<InternodeHop> hops;
    std::vector<size_t> of; // by index into `hops`: the flow
    for (; last < flows.size() && keys[last].when == keys[first].when; ++last) {
      split[last] = {{-1, flows[last].bytes}};
      for (size_t h = 0; h < flows[last].hops.size(); ++h)
        if (const Flow::Hop &hop = flows[last].hops[h];
            layout_.topology.node(hop.from) != layout_.topology.node(hop.to)) {
          hops.push_back({hop.from, hop.to, flows[last].bytes, h == 0 && !keys[last].reads()});
          of.push_back(last);
        }
    }
    const std::vector<Relayed> relayed = spread(hops, layout_.topology, layout_.world, room * kMaxRelayPhases);
    for (const Relayed &each : relayed) {
      split[of[each.hop]].emplace_back(each.relay, each.bytes);
      split[of[each.hop]].front().second -= each.bytes;
    }
    std::fill(phases.begin() + static_cast<ptrdiff_t>(first), phases.begin() + static_cast<ptrdiff_t>(last),
              relayPhases(relayed, layout_.world, room - room / 8));
    any = any || !relayed.empty();
  }
  // Cuts and alignment can make a phase exceed the room. Then divide into more phases.
  std::vector<std::pair<FlowKey, Descriptor>> all;
  for (int64_t factor = 1; any && factor <= kMaxRelayPhases; factor *= 2) {
    all.clear();
    for (size_t s = 0; s < flows.size(); ++s)
      cutFlow(keys[s], llvm::ArrayRef(descriptors).slice(firsts[s], firsts[s + 1] - firsts[s]), split[s],
              phases[s] * factor, all);
    if (layout_.stagingLimit == 0 || fits(all, room))
      return all;
  }
  return {};
}

/// Whether no relay holds more than `room` bytes in any phase. Descriptors of one flow are consecutive.
bool Relays::fits(const std::vector<std::pair<FlowKey, Descriptor>> &all, int64_t room) const {
  std::map<std::pair<EpochPhase, int32_t>, int64_t> held;
  for (size_t first = 0, last = 0; first < all.size(); first = last) {
    int64_t bytes = 0;
    for (; last < all.size() && all[last].first == all[first].first; ++last)
      bytes += bytesOf(shapes_[all[last].second.shape]);
    const FlowKey &key = all[first].first;
    if (key.relay < 0)
      continue;
    int64_t &sum = held[{key.when, key.relay}];
    sum += alignUp(bytes);
    if (sum > room)
      return false;
  }
  return true;
}

/// Divides the part of each relay evenly among all phases, with cuts at good positions of the flow.
void Relays::cutFlow(const FlowKey &key, llvm::ArrayRef<Descriptor> descriptors, const Split &split, int64_t phases,
                     std::vector<std::pair<FlowKey, Descriptor>> &all) {
  DescriptorCuts cuts(descriptors.size());
  int64_t bytes = 0;
  for (const Descriptor &d : descriptors) {
    cuts.add(bytesOf(shapes_[d.shape]), shapes_[d.shape].rowBytes, 0);
    bytes += bytesOf(shapes_[d.shape]);
  }
  cuts.endList();
  std::vector<Descriptor> stack(descriptors.rbegin(), descriptors.rend()), taken;
  int64_t at = 0, begin = 0;
  for (const auto &[relay, some] : split) {
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t wanted = begin + static_cast<int64_t>(static_cast<__int128>(some) * (phase + 1) / phases);
      const int64_t end = wanted == bytes ? bytes : wanted > at ? cuts.best(0, at, wanted) : at;
      taken.clear();
      cutter_.take(stack, end - at, taken);
      FlowKey next = key;
      next.relay = relay;
      next.when.phase += static_cast<uint32_t>(phase);
      for (const Descriptor &d : taken)
        all.emplace_back(next, d);
      at = end;
    }
    begin += some;
  }
}

void Relays::layOut(const std::vector<FlowKey> &keys, const std::vector<Flow> &flows) {
  std::map<std::pair<EpochPhase, int32_t>, int64_t> held; // by epoch, phase and relay
  for (size_t s = 0; s < flows.size(); ++s)
    if (const int32_t relay = keys[s].relay; relay >= 0) {
      int64_t &bytes = held[{keys[s].when, relay}];
      bases_[s] = bytes;
      bytes += alignUp(flows[s].bytes);
      held_[static_cast<size_t>(relay)] = std::max(held_[static_cast<size_t>(relay)], bytes);
    }
}

} // namespace reshard
