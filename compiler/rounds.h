// Rounds: which bytes go from which rank to which at the same time.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace reshard {

/// Bytes that go from rank to rank: from the first hop's `from` to its `to`, and on from there. A hop's bytes are there
/// once the hop `after` has brought them; -1: from the start.
struct Stream {
  struct Hop {
    int32_t from = 0, to = 0; // world ranks
    int32_t after = -1;       // an earlier hop of the stream, whose `to` is this `from`
  };
  std::vector<Hop> hops;
  int64_t bytes = 0;
};

/// Bytes [begin, end) of a stream on one hop, in a round.
struct Grant {
  uint32_t round = 0, stream = 0, hop = 0;
  int64_t begin = 0, end = 0;
};

/// What a round may hold. Messages between nodes and inside them are two tiers, which share nothing.
struct RoundLimits {
  int64_t bytes = 0;      // of a message between nodes
  int64_t localBytes = 0; // of a message inside a node
  int localTurns = 1;     // messages inside a node that a rank sends, and receives, in a round
};

/// Gives every byte of every hop to a round such that in one round a NIC sends at most one message and receives at most
/// one, and inside a node a rank sends and receives at most `localTurns`. A pair has at most one message a round; what
/// a message brought in round r goes on in round r + 2 or later, so that it can be unpacked while round r + 1 is on its
/// way. One round is a matching of senders and receivers that prefers the ports with most left to do, in either
/// direction, and then the partner with most left: an edge colouring of the message graph in as many colours as the
/// busiest port has messages, where one is to be had that way (König: there is one), and rarely more. `snap(stream,
/// from, to)`: the best place, in [from, to], to cut a stream; `from` only where `to` is less than a whole message
/// away. O(rounds * pairs).
std::vector<Grant> dealRounds(const std::vector<Stream> &streams, const ir::Topology &topology,
                              const RoundLimits &limits,
                              const std::function<int64_t(uint32_t stream, int64_t from, int64_t to)> &snap);

} // namespace reshard
