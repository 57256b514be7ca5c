// Spread: where the NICs of a node that send to other nodes have more to send than others of the node, part of it goes
// by way of ranks whose NICs have less. These relays hold it in their arenas until it has left.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes from a rank to a rank of another node. What only passes on what it got cannot be relayed.
struct InternodeHop {
  int32_t from = 0, to = 0; // world ranks
  int64_t bytes = 0;
  bool first = true; // the first rank sends them, and all bytes may be relayed
};

/// Of a sending, bytes that another rank of the sender's node sends.
struct Relayed {
  size_t hop = 0;
  int32_t relay = 0; // world rank
  int64_t bytes = 0;
};

/// What is to be relayed such that the NICs of every node of the world's ranks send as evenly as pays: no more than
/// makes up for the busiest receiving NIC, and than the links inside a node bring in time. No rank relays more than
/// `room` bytes. Ordered by sending.
std::vector<Relayed> spread(const std::vector<InternodeHop> &hops, const ir::Topology &topology, int64_t world,
                            int64_t room);

/// In how many phases, one after the other, what is relayed goes, so that ranks hold about `room` bytes of it at a
/// time.
int64_t relayPhases(const std::vector<Relayed> &relayed, int64_t world, int64_t room);

/// Bytes that a rank may hold for others at a time, where `sent` bytes of messages need slots beside them; 0: the
/// staging limit is too small to relay.
int64_t relayRoom(const ir::Layout &layout, int64_t sent);
/// More phases than this would cost more messages than relays gain.
constexpr int64_t kMostRelayPhases = 64;

} // namespace reshard
