// SPDX-License-Identifier: Apache-2.0
// The chunk sizes of rounds: the best sizes on the topology, within the staging limit.
#pragma once

#include "compiler/schedule/rounds.h"
#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <vector>

namespace reshard {

/// The largest number of chunks of a plan. A small staging limit makes many.
constexpr int64_t kMaxPlanChunks = 1 << 24;

/// The chunk sizes of each link tier: the best size (message_size.h), or a smaller one that fills the last round of
/// more pairs or that the staging limit requires; and the rounds of a chunk between nodes. The arena holds two chunks
/// in each direction: one is packed while the other is sent, or unpacked while the other is received. `staged`: the
/// largest number of bytes that a rank's arena holds besides messages. `copies`: the number of ranks to which the
/// sender of a flow sends it; `flows` has one of them. Returns an error if the plan would have too many chunks, a
/// StagingLimitError if a higher limit avoids that.
llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged,
                                        int64_t copies = 1);

} // namespace reshard
