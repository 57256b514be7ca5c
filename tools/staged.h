// Rows of a plan that come by way of a rank's arena, where they are gathered to be quantised: followed from where they
// come to where they end, with proof that they are there when they are read, and until then.
#pragma once

#include "tools/plan_verifier.h"
#include "tools/relayed.h"

#include <map>

namespace reshard::tools {

class StagedMoves {
public:
  StagedMoves(const Plan &plan, const PairedPlan &paired) : plan_(plan), paired_(paired), relayed_(paired) {}

  /// Everything that ends in a buffer of a rank; of what a copy reads from the arena, or another rank relays, what
  /// brought it. An error text, empty on success: bytes that are read were not written by steps that the copy waits
  /// for, or are written over before; or tensor scales are used by a step that does not wait for them.
  std::string forEachMove(uint32_t rank, const std::function<void(const Move &)> &visit);

private:
  /// What a step brought to the arena and nobody has quantised.
  struct Arrival {
    Move move;
    uint32_t step;
    uint64_t end;
  };
  /// Bytes of the arena that a step has quantised last.
  struct QuantizedRange {
    uint64_t end;
    uint32_t step;
  };
  std::string write(uint32_t step, const Move &move);
  std::string read(uint32_t step, const Move &row, const std::function<void(const Move &)> &visit);
  bool coversOnce(uint64_t begin, uint64_t end, uint64_t &missing);
  bool split(uint64_t begin, uint64_t end);
  std::string scale(uint32_t step, uint32_t buffer);
  bool stages() const;
  bool waits(uint32_t step, uint32_t earlier);
  bool waitsForCopy(uint32_t step, uint32_t copy);
  std::string fail(uint32_t step, const std::string &why) const;

  const Plan &plan_;
  const PairedPlan &paired_;
  RelayedMoves relayed_;
  uint32_t rank_ = 0;
  const schema::Segment *segment_ = nullptr;
  uint32_t lookedAt_ = UINT32_MAX;                     // the step of after_
  std::vector<uint32_t> after_;                        // sorted
  std::multimap<uint64_t, Arrival> arrivals_;          // by begin
  std::map<uint64_t, QuantizedRange> quantizedRanges_; // by begin, apart
  uint64_t work_ = 0;                                  // of Cutters
  std::vector<uint32_t> copies_;                       // copies from the arena, each of which waits for the one before
  std::map<uint32_t, std::vector<uint32_t>> amaxWriters_; // buffers of faces `amax`: the steps that write them
  std::map<uint32_t, uint32_t> reduced_;                  // the same: the step that makes tensor scales of them
};

} // namespace reshard::tools
