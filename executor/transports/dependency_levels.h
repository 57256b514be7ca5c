// SPDX-License-Identifier: Apache-2.0
// The copies that a process with all ranks makes instead of messages, and their order.
#pragma once

#include "executor/transports/transport.h"

#include <functional>

namespace reshard {

/// Visits one copy. `input` null: zeros; `output` null: a step `reduce` on the quantized view `input`.
using CopyVisitor = std::function<Status(uint32_t level, const LocalRank &from, const schema::Operand *input,
                                         const LocalRank &to, const schema::Operand *output)>;

/// Pairs operand k of every send with operand k of its receive and visits all copies of a run by ascending dependency
/// level, as in the plan: a copy waits only for copies of lower levels. The loader has checked the levels of each rank,
/// and both sides of a message must have one, so this order is right for every plan. Fails if `visit` does, if ranks
/// are missing, or if their steps differ.
Status forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks, const CopyVisitor &visit);

} // namespace reshard
