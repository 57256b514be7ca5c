// What no plan can beat: lower bounds that the report prints beside what was reached.
#pragma once

#include "ir/ir.h"

namespace reshard {

/// The least that the busiest source rank must send where no target passes anything on, in bytes, given who holds what and that
/// a rank which holds a piece itself takes its own (`local`: and one whose node holds it, its node's): the exact fractional
/// optimum (optimum.h). Needs tiles, not yet choices. `generation`: only targets that joined up to then.
int64_t egressFloor(const ir::Layout &layout, const ir::Transfers &transfers, bool local = true,
                    uint32_t generation = UINT32_MAX);

/// The most that a target rank must receive from others, in bytes; no choice of sources changes it.
int64_t ingressFloor(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
