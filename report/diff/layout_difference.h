// SPDX-License-Identifier: Apache-2.0
// Compares the layouts of a plan with those of its job.
#pragma once

#include "schema/manifest.h"

#include <string>

namespace reshard::report {

/// The first difference between the layouts of two manifests: world, index variables, tensors, and the endpoints with
/// their ranks and params; "" if there is none. Names of layouts, lines where params are declared, epochs, and
/// engine replicas to report on may differ.
std::string layoutDifference(const schema::Manifest &plan, const schema::Manifest &job);

} // namespace reshard::report
