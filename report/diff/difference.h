// SPDX-License-Identifier: Apache-2.0
// The comparison that reshard-diff prints.
#pragma once

#include "command/common.h"

#include <map>
#include <string>
#include <vector>

namespace reshard::report {

struct DifferenceOptions {
  std::string before, after, format = "text", failOn;
};

/// Prints the differences on stdout and errors on stderr. Returns the exit code.
int difference(const DifferenceOptions &options);

/// Whether `expression` (base/expression.h), a comparison or several joined by `and`, `or` and `not`, holds for
/// `names`. Sets `error` to an error text if the expression is invalid.
bool holds(const std::string &expression, const std::map<std::string, double> &names, std::string &error);

/// A condition that holds, and the values of its names.
struct HeldCondition {
  std::string text;
  std::map<std::string, double> values;
};

/// Why a valid expression holds: the operands of its outermost `or` that do, or the whole. Empty if it does not hold.
std::vector<HeldCondition> heldConditions(const std::string &expression, const std::map<std::string, double> &names);

} // namespace reshard::report
