// The copies that a process with all ranks makes instead of messages, and their order.
#pragma once

#include "executor/transport.h"

#include <functional>

namespace reshard {

/// Visits one copy. `input` null: zeros; `output` null: a step `reduce` on the quantized view `input`. Returns an error
/// text; empty on success.
using CopyVisitor = std::function<std::string(uint32_t level, const LocalRank &from, const schema::Operand *input,
                                              const LocalRank &to, const schema::Operand *output)>;

/// Pairs operand k of every send with operand k of its receive and visits all copies of a run by ascending dependency
/// level, as in the plan: a copy waits only for copies of lower levels. The loader has checked the levels of each rank,
/// and both sides of a message must have one, so this order is right for every plan. Returns an error text, of `visit`
/// or because ranks are missing or their steps differ; empty on success.
std::string forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks, const CopyVisitor &visit);

} // namespace reshard
