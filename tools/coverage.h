// The proof that a plan is right, from the plan alone: it plays every segment row by row and asks the manifest's layouts, never the
// planner, what each row must be.
#pragma once

#include "executor/load.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::tools {

/// One contiguous row that a plan moves: from a buffer of one rank to a buffer of one rank. No source: zeros.
struct Row {
  uint32_t targetBuffer = 0;
  uint64_t targetOffset = 0, bytes = 0;
  bool zero = false;
  uint32_t sourceRank = 0, sourceBuffer = 0;
  uint64_t sourceOffset = 0;
};

/// All segments of a plan with their messages paired.
class PairedPlan {
public:
  explicit PairedPlan(const Plan &plan) : plan_(plan) {}
  /// Loads and checks every segment; every send must have one receive of the same number, round, bytes and operands.
  std::string load();
  /// Every row that ends on a rank by a step; also in its arena (buffer 0), and from there.
  std::string forEachRow(uint32_t rank, uint32_t step, const std::function<void(const Row &)> &visit) const;
  /// Every row of one operand of a rank: `visit(row)` with its place as the target.
  std::string forEachRow(uint32_t rank, const schema::Operand &operand, const std::function<void(const Row &)> &visit) const {
    return rows(nullptr, rank, nullptr, *segments_[rank], operand, visit);
  }
  const schema::Segment &segment(uint32_t rank) const { return *segments_[rank]; }

private:
  struct End {
    uint32_t rank = 0;
    const schema::Step *step = nullptr;
  };
  std::string rows(const schema::Segment *from, uint32_t fromRank, const schema::Operand *input, const schema::Segment &to,
                   const schema::Operand &output, const std::function<void(const Row &)> &visit) const;

  const Plan &plan_;
  std::vector<const schema::Segment *> segments_;
  std::vector<End> sends_;
};

struct CoverageResult {
  std::string error;          // the first byte that is wrong, in words; empty: the plan is right
  uint64_t bytes = 0, rows = 0;
};

/// Every byte of every target param is written exactly once, from the byte that the layouts say, or zero where they say padding.
/// Time and memory grow with rows, one rank at a time.
CoverageResult prove(const Plan &plan, const std::function<void(double)> &progress);

} // namespace reshard::tools
