// SPDX-License-Identifier: Apache-2.0
// The schedules of all ranks, one at a time: all of a large job need more memory than the plan. The pass `schedule`
// makes them, `assign-staging` completes them, and the printer, the verifier and the emitter read them.
#pragma once

#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <memory>
#include <vector>

namespace reshard {

class RankSchedules {
public:
  virtual ~RankSchedules() = default;
  /// The number of world ranks.
  virtual size_t size() const = 0;
  /// The schedule of a world rank. If it is made by this call, `memory` has it, whose allocations are used again.
  /// Threads may call it at the same time, each with a `memory` of its own.
  virtual const ir::RankSchedule &get(size_t rank, ir::RankSchedule &memory) = 0;
  /// About the number of operands of a world rank's steps.
  virtual size_t operands(size_t rank) const = 0;
  /// The pass `assign-staging`: an error if an arena exceeds the staging limit.
  virtual llvm::Error assignStaging(const ir::Layout &layout) = 0;
};

/// Schedules in memory: for IR text, and for jobs in which the steps of different ranks depend on each other.
class StoredRanks : public RankSchedules {
public:
  explicit StoredRanks(std::vector<ir::RankSchedule> ranks) : ranks_(std::move(ranks)) {}
  size_t size() const override { return ranks_.size(); }
  const ir::RankSchedule &get(size_t rank, ir::RankSchedule &) override { return ranks_[rank]; }
  size_t operands(size_t rank) const override;
  llvm::Error assignStaging(const ir::Layout &layout) override;

private:
  std::vector<ir::RankSchedule> ranks_;
};

/// All schedules, for a reader that compares different ranks.
std::vector<ir::RankSchedule> allOf(RankSchedules &ranks);

/// Assigns an offset in the arena to each message of a rank that is staged.
void assignRankStaging(ir::RankSchedule &rank, const ir::Layout &layout);

} // namespace reshard
