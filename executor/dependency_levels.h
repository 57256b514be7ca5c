// Which copies a process that has all ranks makes in place of messages, and in what order.
#pragma once

#include "executor/transport.h"

#include <functional>

namespace reshard {

/// One copy: `input` null: zeros; `output` null: the work of a step `reduce` on the face `input`. An error text, empty
/// on success.
using CopyVisitor = std::function<std::string(uint32_t level, const LocalRank &from, const schema::Operand *input,
                                              const LocalRank &to, const schema::Operand *output)>;

/// Pairs operand k of every send with operand k of its receive and visits all copies of a run, wave after wave: first
/// what ranks copy and fill themselves and the messages that pass on nothing, then what waits for these, and so on. An
/// error text, empty on success: of `visit`, or that ranks are missing or differ.
std::string forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks, const CopyVisitor &visit);

} // namespace reshard
