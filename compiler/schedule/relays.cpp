// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/relays.h"

#include "compiler/schedule/descriptor_cuts.h"
#include "compiler/schedule/spread.h"

#include <algorithm>

namespace reshard {

using namespace ir;

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
