// SPDX-License-Identifier: Apache-2.0
// Checks that the source holds each of its tensors completely: every element is on some mesh rank.
#pragma once

#include "base/yaml/diagnostics.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// For each tensor pattern, whether any mesh rank of the source holds an element of it. If some of its elements are on
/// no mesh rank, reports an error at the param that holds the others, or with `gaps` a warning.
std::vector<bool> checkSourceCoverage(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps,
                                      Diagnostics &diagnostics);

} // namespace reshard
