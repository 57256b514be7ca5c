// SPDX-License-Identifier: Apache-2.0
// Balances the NICs of a node. If some NICs of a node have more to send to other nodes than others have, part of these
// bytes is sent over relays: ranks of the same node with less loaded NICs. A relay holds the bytes in its arena until
// it has sent them.
#pragma once

#include "ir/ir.h"

#include <cstdint>
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

} // namespace reshard
