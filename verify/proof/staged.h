// SPDX-License-Identifier: Apache-2.0
// Bytes that are staged in a rank's arena before they are quantized. This traces them from their source to their
// target, and proves that they are complete when the copy reads them and are not overwritten before.
#pragma once

#include "verify/proof/plan_verifier.h"
#include "verify/proof/relayed.h"

#include <map>

namespace reshard::verify {

class StagedMoves {
public:
  StagedMoves(const Plan &plan, const PairedPlan &paired) : plan_(plan), paired_(paired), relayed_(paired) {}

  /// Calls `visit` for all moves into the buffers of a rank. A move out of an arena (a copy after staging, or a relayed
  /// message) is replaced by the moves that wrote those bytes. Errors: a copy
  /// reads staged bytes that no step it waits for has written, staged bytes are overwritten before the copy, or a step
  /// uses tensor scales without waiting for them.
  Status forEachMove(uint32_t rank, const std::function<void(const Move &)> &visit);

private:
  /// A move of a step to the arena whose bytes are not quantized yet.
  struct Arrival {
    Move move;
    uint32_t step;
    uint64_t end;
  };
  /// A range of the arena and the last step that quantized it.
  struct QuantizedRange {
    uint64_t end;
    uint32_t step;
  };
  Status write(uint32_t step, const Move &move);
  Status read(uint32_t step, const Move &row, const std::function<void(const Move &)> &visit);
  bool coversOnce(uint64_t begin, uint64_t end, uint64_t &missing);
  bool split(uint64_t begin, uint64_t end);
  Status scale(uint32_t step, uint32_t buffer);
  bool stages() const;
  bool waits(uint32_t step, uint32_t earlier);
  bool waitsForCopy(uint32_t step, uint32_t copy);
  Status fail(uint32_t step, const std::string &why) const;

  const Plan &plan_;
  const PairedPlan &paired_;
  RelayedMoves relayed_;
  uint32_t rank_ = 0;
  const schema::Segment *segment_ = nullptr;
  uint32_t lookedAt_ = UINT32_MAX;                        // the step that after_ belongs to
  std::vector<uint32_t> after_;                           // sorted
  std::multimap<uint64_t, Arrival> arrivals_;             // by begin
  std::map<uint64_t, QuantizedRange> quantizedRanges_;    // by begin, disjoint
  uint64_t work_ = 0;                                     // spent by NestSplitters
  std::vector<uint32_t> copies_;                          // copies from the arena; each waits for the previous one
  std::map<uint32_t, std::vector<uint32_t>> amaxWriters_; // by buffer of an `amax` view: the steps that write it
  std::map<uint32_t, uint32_t> reduced_; // by the same buffer: the step that computes tensor scales from it
};

} // namespace reshard::verify
