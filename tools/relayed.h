// What ranks relay: bytes that come to a rank's arena by receives and leave it by sends, followed back to where they
// stood before.
#pragma once

#include "tools/plan_verifier.h"

namespace reshard::tools {

class RelayedMoves {
public:
  explicit RelayedMoves(const PairedPlan &paired) : paired_(paired) {}

  /// Of a move out of the arena of the rank that sends it, as moves from where the receives that the send waits for
  /// have it from. An error text, empty on success: they do not bring all of it, or bring some of it twice.
  std::string resolve(const Move &move, const schema::Step &send, const std::function<void(const Move &)> &visit);

private:
  std::string read(uint32_t rank, const schema::Step &send);

  const PairedPlan &paired_;
  const schema::Step *send_ = nullptr; // of which the following tell
  std::vector<Move> arrivals_;         // to the arena
  RegularSets sets_;                   // the same: tags are numbers of moves, values offsets in their sources
  uint64_t work_ = 0;                  // of Cutters
};

} // namespace reshard::tools
