// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect --format=html: one page without other files, made of page.html and data of the plan.
#pragma once

#include "base/topology.h"

#include <optional>
#include <string>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// The most ranks that have a row and a column of their own in the page. Of more, neighbors share one.
constexpr uint32_t kPageRanks = 64;

/// The text of the page. topology: to simulate on; without it the page has no time line. Throws Failure.
std::string pageOf(const Plan &plan, const std::optional<Topology> &topology);

} // namespace reshard::report
