// SPDX-License-Identifier: Apache-2.0
// Balances the NICs of a node. If some NICs of a node have more to send to other nodes than others have, part of these
// bytes is sent over relays: ranks of the same node with less loaded NICs. A relay holds the bytes in its arena until
// it has sent them.
#pragma once

#include "compiler/schedule/descriptor_cutter.h"
#include "compiler/schedule/rounds.h"
#include "compiler/schedule/staged_ranges.h"
#include "ir/ir.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace reshard {

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
std::vector<Relayed> spread(const std::vector<InternodeHop> &hops, const ir::Topology &topology, int64_t world,
                            int64_t room);

/// The number of phases into which relayed bytes are divided so that a relay holds about `room` bytes at a time.
int64_t relayPhases(const std::vector<Relayed> &relayed, int64_t world, int64_t room);

/// The bytes that a relay may hold at a time; its arena also needs slots for `sent` bytes of messages of the whole
/// plan. 0: the staging limit is too small for relays.
int64_t relayRoom(const ir::Layout &layout, int64_t sent);
/// With more phases the cost of additional messages exceeds the gain of relays.
constexpr int64_t kMaxRelayPhases = 64;

/// The properties that all descriptors of a flow share.
struct FlowKey {
  EpochPhase when;
  int32_t source = 0, target = 0; // world ranks
  int32_t route = -1;             // the number of its world ranks (RouteNumbers); -1: none
  int32_t relay = -1;             // the rank of the source's node that forwards the flow to the target; -1: none
  bool operator==(const FlowKey &) const = default;
  auto fields() const { return std::tie(when, source, target, route, relay); }
  /// Whether the first rank reads the flow from files, without a message.
  bool reads() const { return source == target; }
};

class Relays {
public:
  Relays(const ir::Layout &layout, Interner<ir::Shape> &shapes, DescriptorCutter &cutter)
      : layout_(layout), shapes_(shapes), cutter_(cutter), held_(layout.world) {}

  /// Returns the descriptors of all flows, cut where parts of a flow take different relays, each with its new key;
  /// empty if no flow is relayed. The descriptors of flow s are [firsts[s], firsts[s + 1]). The flows of an epoch are
  /// divided into as many phases as the memory of the relays requires. Jobs with quantized views have phases of their
  /// own: in these nothing is relayed.
  std::vector<std::pair<FlowKey, ir::Descriptor>> cut(const std::vector<FlowKey> &keys, const std::vector<Flow> &flows,
                                                      const std::vector<size_t> &firsts,
                                                      const std::vector<ir::Descriptor> &descriptors);
  /// Assigns offsets in the relays' arenas to the relayed flows. All phases use the same memory.
  void layOut(const std::vector<FlowKey> &keys, const std::vector<Flow> &flows);

  /// The offset of a relayed flow in the arena of its relay.
  int64_t base(size_t flow) const { return bases_.at(flow); }
  /// The bytes at the beginning of a rank's arena that hold relayed flows.
  int64_t held(int32_t rank) const { return held_[static_cast<size_t>(rank)]; }

private:
  using Split = std::vector<std::pair<int32_t, int64_t>>; // (relay or -1, bytes)
  bool fits(const std::vector<std::pair<FlowKey, ir::Descriptor>> &all, int64_t room) const;
  void cutFlow(const FlowKey &key, llvm::ArrayRef<ir::Descriptor> descriptors, const Split &split, int64_t phases,
               std::vector<std::pair<FlowKey, ir::Descriptor>> &all);

  const ir::Layout &layout_;
  Interner<ir::Shape> &shapes_;
  DescriptorCutter &cutter_;
  std::map<size_t, int64_t> bases_; // by flow
  std::vector<int64_t> held_;       // by rank
};

} // namespace reshard
