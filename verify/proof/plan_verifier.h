// SPDX-License-Identifier: Apache-2.0
// Proves that a plan is right, from the plan alone: follows the steps of every segment and compares each byte with the
// manifest's layouts, without the compiler. Regular moves are proven as a whole (verify/proof/regular_sets.h).
#pragma once

#include "base/status.h"
#include "executor/load/load.h"
#include "verify/proof/regular_sets.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::verify {

/// Bytes that an operand moves from one buffer of one rank to one buffer of one rank: rows in nested loops, outermost
/// first. `zero`: there is no source, zeros are written.
struct Move {
  struct Loop {
    int64_t count, target, source; // bytes from row to row
  };
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t targetBuffer = 0;
  uint64_t targetOffset = 0, rowBytes = 0;
  bool zero = false;
  uint32_t sourceRank = 0, sourceBuffer = 0;
  uint64_t sourceOffset = 0;
  std::vector<Loop> loops;
  uint32_t message = kNone;                     // brings the bytes; kNone: the rank copies or fills them itself
  uint32_t relay = kNone, relayMessage = kNone; // the rank that forwards them through its arena to this rank, by
                                                // `message`, and the message that brings them there; kNone: no rank
  uint64_t bytes() const;
};
/// Calls visit(row) for every row of a move; a row is a move without loops.
void forEachRow(const Move &move, const std::function<void(const Move &)> &visit);
/// The elements of a move, of `item` bytes: positions and origins in the target, counterparts in the source.
LoopNest nestOf(const Move &move, int64_t item = 1);
/// Adds the bytes that a move writes. Returns false as RegularSets::add does.
bool addTo(RegularSets &sets, const Move &move);

/// All segments of a plan, with the send and the receive of each message paired.
class PairedPlan {
public:
  explicit PairedPlan(const Plan &plan) : plan_(plan) {}
  /// Loads and checks every segment, on `threads` threads: every send must have exactly one receive with the same
  /// message number, round, bytes and operands.
  Status load(unsigned threads = 1);
  /// Calls `visit` for all moves of one step of a rank, including those to and from its arena (buffer 0). Sends are
  /// skipped: their receives report the moves.
  Status forEachMove(uint32_t rank, uint32_t step, const std::function<void(const Move &)> &visit) const;
  /// The same for one output of a step that is no send.
  Status forEachMove(uint32_t rank, uint32_t step, uint32_t output,
                     const std::function<void(const Move &)> &visit) const;
  /// Calls visit(move) for one operand of a rank, with the operand as the target of the moves.
  Status forEachMove(uint32_t rank, const schema::Operand &operand,
                     const std::function<void(const Move &)> &visit) const {
    return moves({nullptr, rank, nullptr, *segments_[rank], operand, Move::kNone}, visit);
  }
  const schema::Segment &segment(uint32_t rank) const { return *segments_[rank]; }
  /// The send step of a message.
  const schema::Step &send(uint32_t message) const { return *sends_[message].step; }

private:
  struct End {
    uint32_t rank = 0;
    const schema::Step *step = nullptr;
  };
  struct OperandPair {
    const schema::Segment *from; // null without an input
    uint32_t fromRank;
    const schema::Operand *input; // null: `output` is filled with zeros
    const schema::Segment &to;
    const schema::Operand &output;
    uint32_t message; // as in Move
  };
  Status moves(const OperandPair &operands, const std::function<void(const Move &)> &visit) const;

  const Plan &plan_;
  std::vector<std::shared_ptr<const schema::Segment>> segments_;
  std::vector<End> sends_;
};

struct VerifyResult {
  std::string error;     // describes the first wrong byte; empty: the plan is right
  bool tooLarge = false; // `error` says what has too many fragments to compare: the plan may be right
  uint64_t bytes = 0, moves = 0;
  uint32_t replicas = 0; // ranks that were proven by their difference from an earlier one; also those without targets
};

/// Verifies that every byte of every target param is written exactly once, from the source byte that the layouts say,
/// or with zero if they say padding. Time is proportional to the fragments of operands and layouts; replicas of a
/// target that receive the same pieces need time for their operands alone. Memory: the fragments of one rank, and a
/// number for each buffer range and shape of the plan; each of the threads (`jobs`; 0: all cores) has its own.
VerifyResult verifyPlan(const Plan &plan, const std::function<void(double)> &progress, unsigned jobs = 1);

} // namespace reshard::verify
