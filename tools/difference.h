// The answers of reshard-diff.
#pragma once

#include "tools/common.h"

#include <map>
#include <string>

namespace reshard::tools {

struct DifferenceOptions {
  std::string before, after, format = "text", failOn;
};

/// Prints to stdout, complains on stderr; returns the exit code.
int difference(const DifferenceOptions &options);

/// The value of `expression` over `names`: comparisons of numbers and names with < <= > >= == !=, joined by `and` and
/// `or` (and binds tighter). An error text in `error`.
bool holds(const std::string &expression, const std::map<std::string, double> &names, std::string &error);

} // namespace reshard::tools
