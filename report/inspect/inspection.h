// SPDX-License-Identifier: Apache-2.0
// The reports of reshard-inspect.
#pragma once

#include "base/topology.h"
#include "command/common.h"

#include <optional>
#include <string>

namespace reshard::report {

struct InspectionOptions {
  std::string plan, param, explain, format = "text";
  std::string output; // where to write the page of format html
  int64_t rank = -1;  // -1: no rank
  bool verify = false;
  std::optional<Topology> topology; // to simulate on
  uint32_t replicas = 0;            // engine replicas to simulate; 0: those of the plan
  std::string trace;                // where to write the simulation's activities
  double timeout = 0;               // 0: none
};

/// Prints the report on stdout. Returns the exit code, or throws Failure.
int inspect(const InspectionOptions &options);

} // namespace reshard::report
