// SPDX-License-Identifier: Apache-2.0
// Assigns bytes to rounds: in each round a rank sends at most one chunk and receives at most one.
#pragma once

#include "ir/ir.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes that are sent along hops, which form a tree or a forest. A hop can send bytes once the hop `after` has brought
/// them to its `from`; if `after` is -1, it can send all bytes from the start.
struct Flow {
  struct Hop {
    int32_t from = 0, to = 0; // world ranks
    int32_t after = -1;       // index of an earlier hop of the flow, whose `to` is this `from`
  };
  llvm::SmallVector<Hop, 1> hops;
  int64_t bytes = 0;
};

/// Bytes [begin, end) of a flow on one hop.
struct Grant {
  uint32_t flow = 0, hop = 0;
  int64_t begin = 0, end = 0;
};

/// Bytes that one rank sends to another in `rounds` consecutive rounds, beginning with `round`.
struct Message {
  uint32_t round = 0, rounds = 1;
  int32_t from = 0, to = 0; // world ranks
  int64_t bytes = 0;
  int64_t chunk = 0; // bytes of each chunk but the last; 0: the message is one chunk
  llvm::SmallVector<Grant, 1> grants;
};

/// The sizes of chunks. The two link tiers, between nodes and inside nodes, share no ports.
struct RoundLimits {
  int64_t internodeBytes = 0;   // a chunk between nodes; a multiple of kStagingAlignment
  int64_t intranodeBytes = 0;   // a chunk inside a node, which takes one round; a multiple of kStagingAlignment
  uint32_t internodeRounds = 1; // rounds that a chunk between nodes takes
};

/// The positions at which flows can be cut.
class Cuts {
public:
  virtual ~Cuts() = default;
  /// Whether a flow can be cut at byte `at`.
  virtual bool possible(uint32_t flow, int64_t at) const = 0;
  /// The best position in [from, to]; `from` only if there is no other.
  virtual int64_t best(uint32_t flow, int64_t from, int64_t to) const = 0;
};

/// Assigns every byte of every hop to rounds. At any time a rank sends at most one chunk to other nodes and receives at
/// most one from them, and likewise inside its node. (Ranks that share a NIC share its rate too: roundLimits accounts
/// for that.) A chunk that arrived is forwarded after one more chunk's time, so that it can be unpacked while the next
/// one arrives. Returns the messages, ordered by round, sender and receiver.
///
/// The chunks of a round are a matching of senders and receivers, and all rounds are an edge coloring of the bipartite
/// multigraph of chunks. Without relays the number of colors is that of the chunks of the busiest port, which König's
/// theorem guarantees; with relays it is rarely more. A matched pair stays matched, and its chunks are one message,
/// until it has no bytes left, until a port with the most chunks left needs one of its ports, or, with relays, until
/// its turn ends (turns grow with time). A port that becomes free chooses the partner with the most chunks left.
///
/// Time: O(rounds * ports + messages * pairs of a port).
std::vector<Message> assignRounds(llvm::ArrayRef<Flow> flows, const ir::Topology &topology, const RoundLimits &limits,
                                  const Cuts &cuts);

} // namespace reshard
