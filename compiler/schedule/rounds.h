// Rounds: which bytes go from which rank to which at the same time.
#pragma once

#include "ir/ir.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes that go from rank to rank: from the first hop's `from` to its `to`, and on from there. A hop's bytes are there
/// once the hop `after` has brought them; -1: from the start.
struct Stream {
  struct Hop {
    int32_t from = 0, to = 0; // world ranks
    int32_t after = -1;       // an earlier hop of the stream, whose `to` is this `from`
  };
  llvm::SmallVector<Hop, 1> hops;
  int64_t bytes = 0;
};

/// Bytes [begin, end) of a stream on one hop.
struct Grant {
  uint32_t flow = 0, hop = 0;
  int64_t begin = 0, end = 0;
};

/// What goes from one rank to one other in `rounds` rounds on end, `round` the first.
struct Message {
  uint32_t round = 0, rounds = 1;
  int32_t from = 0, to = 0; // world ranks
  int64_t bytes = 0;
  int64_t chunk = 0; // the bytes of all its chunks but the last; 0: it is one
  llvm::SmallVector<Grant, 1> grants;
};

/// What a round may hold. Messages between nodes and inside them are two tiers, which share nothing.
struct RoundLimits {
  int64_t internodeBytes = 0;   // of a chunk between nodes; both multiples of kStagingAlignment
  int64_t intranodeBytes = 0;   // of a chunk inside a node, which takes a round
  uint32_t internodeRounds = 1; // that a chunk between nodes takes
};

/// Where streams can be cut: between elements.
class Cuts {
public:
  virtual ~Cuts() = default;
  virtual bool possible(uint32_t flow, int64_t at) const = 0;
  /// The best place in [from, to]; `from` only where there is no other.
  virtual int64_t best(uint32_t flow, int64_t from, int64_t to) const = 0;
};

/// Gives every byte of every hop to rounds such that at any time a rank sends at most one chunk to other nodes and
/// receives at most one, and so inside its node. (Ranks that share a NIC share its time as well.) What a chunk brought
/// goes on when as much time has passed again as it took, so that it can be unpacked while the next one is on its way.
/// Chunks are matchings of senders and receivers: an edge colouring of the graph of chunks in as many colours as the
/// busiest port has chunks, where one is to be had (König: without relays there is one), and rarely more. A pair that
/// is matched stays so, which makes one message of its chunks, until it has nothing more to send, or until a port that
/// has as much left as any needs one of the two, or, with relays, a turn is over that grows with time. Ports that come
/// free choose the partner with most left. Ordered by round, sender and receiver. O(rounds * ports + messages * pairs
/// of a port).
std::vector<Message> assignRounds(llvm::ArrayRef<Stream> flows, const ir::Topology &topology, const RoundLimits &limits,
                                  const Cuts &cuts);

} // namespace reshard
