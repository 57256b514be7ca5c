// SPDX-License-Identifier: Apache-2.0
// Checks that no two params of a mesh rank and no two tensors have the same name. Compares patterns, not instances.
#pragma once

#include "base/yaml/diagnostics.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Reports params with the same name on one mesh rank, at the declaration of the later one. `titles`, by param: the
/// names in messages of params without a declaration ("the scales of param 'x'"); empty for the others.
void checkParamNames(const ir::Layout &layout, const ir::Endpoint &endpoint, const std::vector<Location> &declaredAt,
                     const std::vector<std::string> &titles, Diagnostics &diagnostics);

/// Reports tensors with the same name. `tensors`: name pattern, variables and existing values of each, tied ones too.
void checkTensorNames(const ir::Layout &layout, const std::vector<ir::TensorPattern> &tensors,
                      const std::vector<Location> &declaredAt, Diagnostics &diagnostics);

} // namespace reshard
