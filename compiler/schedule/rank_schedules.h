// SPDX-License-Identifier: Apache-2.0
// Complete schedules of ranks, made one at a time: those of a large job need more memory than the plan.
#pragma once

#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <memory>

namespace reshard {

class RankSchedules {
public:
  virtual ~RankSchedules() = default;
  /// Replaces `schedule` by that of a world rank, as the passes `schedule` and `assign-staging` make it; may reuse its
  /// memory. Threads may call it at the same time.
  virtual void make(int32_t rank, ir::RankSchedule &schedule) = 0;
  /// The number of sends and receives of a world rank.
  virtual size_t messages(int32_t rank) const = 0;
};

/// The pass `schedule`. If no step of a rank depends on those of other ranks, and if no limit of the staging can be
/// exceeded, the module's schedule gets its counts only, and the result makes its ranks: the module must outlive it.
/// Else the schedule gets its ranks, the pass `assign-staging` must follow, and the result is null.
llvm::Expected<std::unique_ptr<RankSchedules>> scheduleOneByOne(ir::Module &module);

/// The pass `assign-staging`, of one rank.
void assignRankStaging(ir::RankSchedule &rank, const ir::Layout &layout);

} // namespace reshard
