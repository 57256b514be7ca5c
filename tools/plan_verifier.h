// The proof that a plan is right, from the plan alone: it plays every segment and asks the manifest's layouts, never
// the planner, what each byte must be. What moves in even steps is proven as a whole (tools/regular_sets.h).
#pragma once

#include "executor/load.h"
#include "tools/regular_sets.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::tools {

/// What an operand of a plan moves from one buffer to one buffer, of one rank each: rows in loops, outermost first. No
/// source: zeros.
struct Move {
  struct Loop {
    int64_t count, target, source; // bytes from row to row
  };
  uint32_t targetBuffer = 0;
  uint64_t targetOffset = 0, rowBytes = 0;
  bool zero = false;
  uint32_t sourceRank = 0, sourceBuffer = 0;
  uint64_t sourceOffset = 0;
  std::vector<Loop> loops;
  uint64_t bytes() const;
};
/// Every row of a move, as a move without loops.
void forEachRow(const Move &move, const std::function<void(const Move &)> &visit);
/// Adds the bytes that a move writes, as Boxes::add does.
bool addTo(RegularSets &sets, const Move &move);

/// All segments of a plan with their messages paired.
class PairedPlan {
public:
  explicit PairedPlan(const Plan &plan) : plan_(plan) {}
  /// Loads and checks every segment; every send must have one receive of the same number, round, bytes and operands.
  std::string load();
  /// Everything that ends on a rank by a step; also in its arena (buffer 0), and from there.
  std::string forEachMove(uint32_t rank, uint32_t step, const std::function<void(const Move &)> &visit) const;
  /// Everything of one operand of a rank: `visit(move)` with its place as the target.
  std::string forEachMove(uint32_t rank, const schema::Operand &operand,
                          const std::function<void(const Move &)> &visit) const {
    return moves(nullptr, rank, nullptr, *segments_[rank], operand, visit);
  }
  const schema::Segment &segment(uint32_t rank) const { return *segments_[rank]; }
  /// The send of a message.
  const schema::Step &send(uint32_t message) const { return *sends_[message].step; }

private:
  struct End {
    uint32_t rank = 0;
    const schema::Step *step = nullptr;
  };
  std::string moves(const schema::Segment *from, uint32_t fromRank, const schema::Operand *input,
                    const schema::Segment &to, const schema::Operand &output,
                    const std::function<void(const Move &)> &visit) const;

  const Plan &plan_;
  std::vector<const schema::Segment *> segments_;
  std::vector<End> sends_;
};

struct VerifyResult {
  std::string error; // the first byte that is wrong, in words; empty: the plan is right
  uint64_t bytes = 0, moves = 0;
};

/// Every byte of every target param is written exactly once, from the byte that the layouts say, or zero where they say
/// padding. Time grows with the pieces that the operands and the layouts have in common, memory with those of one rank.
VerifyResult verifyPlan(const Plan &plan, const std::function<void(double)> &progress);

} // namespace reshard::tools
