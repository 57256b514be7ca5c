// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect --simulate.
#pragma once

#include "report/inspect/inspection.h"

namespace reshard {
class Plan;
}

namespace reshard::report {

/// Simulates the plan on options.topology, prints the estimate and the lower bound, and writes options.trace. Returns
/// the exit code, or throws Failure.
int inspectSimulation(const Plan &plan, const InspectionOptions &options);

} // namespace reshard::report
