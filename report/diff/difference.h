// SPDX-License-Identifier: Apache-2.0
// The comparison that reshard-diff prints, and that of a plan with its job.
#pragma once

#include "base/status.h"

#include <map>
#include <string>
#include <vector>

namespace reshard::schema {
struct Manifest;
}

namespace reshard::report {

struct DifferenceOptions {
  std::string before, after, format = "text", failOn;
};

/// Prints the differences on stdout. Returns whether the plans differ; with `failOn`, whether it holds.
Result<bool> difference(const DifferenceOptions &options);

/// The first difference between the layouts of two manifests: world, index variables, tensors, and the endpoints with
/// their ranks and params; "" if there is none. Names of layouts, lines where params are declared, epochs, and
/// engine replicas to report on may differ.
std::string layoutDifference(const schema::Manifest &plan, const schema::Manifest &job);

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
