// The answers of reshard-inspect.
#pragma once

#include "tools/common.h"

#include <string>

namespace reshard::tools {

struct InspectionOptions {
  std::string plan, param, format = "text";
  int64_t rank = -1; // -1: none asked for
  bool verify = false;
};

/// Prints to stdout, complains on stderr; returns the exit code.
int inspect(const InspectionOptions &options);

} // namespace reshard::tools
