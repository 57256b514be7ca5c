// SPDX-License-Identifier: Apache-2.0
// The pieces of the drawn tensors: which elements go from where to where, by which message, through which rank.
#pragma once

#include "report/page/drawn_tensor.h"
#include "verify/proof/contents.h"
#include "verify/proof/staged.h"

#include <map>
#include <set>
#include <tuple>

namespace reshard::report {

/// A rank of an endpoint, or a file of one.
struct SideRank {
  uint32_t endpoint = 0, number = 0;
  auto operator<=>(const SideRank &) const = default;
};

/// How elements reach a target rank. Elements by the same route are one piece.
struct PieceRoute {
  SideRank from, to;
  uint32_t sender = 0, receiver = 0; // ranks; of files: those that read and write them
  uint32_t message = verify::Move::kNone, relay = verify::Move::kNone, relayMessage = verify::Move::kNone; // as in Move
  auto operator<=>(const PieceRoute &) const = default;
};

struct DrawnPiece {
  uint64_t bytes = 0;
  Boxes boxes;
};

class DrawnPieces {
public:
  /// `tensors`: those that are drawn.
  DrawnPieces(const Plan &plan, const std::vector<DrawnTensor> &tensors)
      : plan_(plan), tensors_(tensors), paired_(plan), staged_(plan, paired_), contents_(plan.manifest()),
        pieces_(tensors.size()) {}
  /// Reads the plan's steps. Comes first.
  Status load() { return paired_.load(); }

  /// Wants the pieces of a tensor that a target rank receives, and those of the ranks that forward them to it.
  void want(size_t tensor, SideRank to);
  /// Finds all pieces that are wanted.
  Status find();
  /// The pieces of a tensor.
  const std::map<PieceRoute, DrawnPiece> &of(size_t tensor) const { return pieces_[tensor]; }
  /// The round of a message.
  uint32_t round(uint32_t message) const { return paired_.send(message).round(); }

private:
  using Wanted = std::set<std::pair<size_t, SideRank>>;

  std::map<uint32_t, std::vector<size_t>> buffersOf(uint32_t rank) const;
  Status read(uint32_t rank);
  Status add(uint32_t rank, const verify::Move &move, const std::vector<size_t> &tensors);
  SideRank sideRankOf(const schema::BufferRange &range) const;

  const Plan &plan_;
  const std::vector<DrawnTensor> &tensors_;
  verify::PairedPlan paired_;
  verify::StagedMoves staged_;
  verify::Contents contents_;
  verify::BufferContents held_;
  Wanted wanted_, next_, known_;                         // in this pass over the ranks, in the next, in all so far
  std::vector<std::map<PieceRoute, DrawnPiece>> pieces_; // by tensor
  std::map<verify::TensorNumber, size_t> byNumber_;      // tensors by their number in contents_
  uint64_t work_ = 0;                                    // spent by NestSplitters
};

} // namespace reshard::report
