// SPDX-License-Identifier: Apache-2.0
// Relayed bytes: receives write them to a rank's arena and sends forward them from there. This traces them back to the
// buffers from which the receives got them.
#pragma once

#include "verify/proof/plan_verifier.h"

namespace reshard::verify {

class RelayedMoves {
public:
  explicit RelayedMoves(const PairedPlan &paired) : paired_(paired) {}

  /// Translates a move from the sender's arena into moves from the original buffers, through the receives that `send`
  /// waits for, and calls `visit` for each. Returns an error text, empty on success: the receives must write each byte
  /// of the move exactly once.
  Status resolve(const Move &move, const schema::Step &send, const std::function<void(const Move &)> &visit);

private:
  Status read(uint32_t rank, const schema::Step &send);

  const PairedPlan &paired_;
  const schema::Step *send_ = nullptr; // the members below belong to it
  std::vector<Move> arrivals_;         // moves to the arena
  RegularSets sets_;                   // the same as sets: tags are indices in arrivals_, values are source offsets
  uint64_t work_ = 0;                  // spent by NestSplitters
};

} // namespace reshard::verify
