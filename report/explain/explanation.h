// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect --explain.
#pragma once

#include <string>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// Prints where each part of a target param comes from, and why from there. `wanted`: PARAM or PARAM@RANK; without a
/// rank, the first one that has the param. Returns the exit code, or throws Failure.
int explain(const Plan &plan, const std::string &wanted);

} // namespace reshard::report
