// What reshard-inspect --simulate prints.
#pragma once

#include "tools/inspection.h"

namespace reshard {
class Plan;
}

namespace reshard::tools {

/// Simulates the plan on options.topology and prints the prediction beside its floor; writes options.trace. The exit
/// code.
int inspectSimulation(const Plan &plan, const InspectionOptions &options);

} // namespace reshard::tools
