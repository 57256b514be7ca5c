// SPDX-License-Identifier: Apache-2.0
// Dependency levels of steps: an order in time for transports that copy between the ranks of one process.
#pragma once

#include "ir/ir.h"

namespace reshard {

/// Sets the dependency level of each step: 0 if it waits for nothing, else one more than the greatest level of the
/// steps in its `after` that raise it (schema/levels.h). A send and its receive have one level. Returns the number of
/// levels; the levels are valid only if these are at most schema::kMaxLevels. Time: linear in steps and `after`.
uint64_t assignDependencyLevels(ir::Schedule &schedule);

} // namespace reshard
