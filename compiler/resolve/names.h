// No two params of one place, and no two tensors, may have the same name. Looked at by pattern, not by instance.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Reports params of one name on one place, at the place where the later is declared. `titles`: what those that are not
/// declared themselves are ("the scales of param 'x'"), by param; empty text for the others.
void checkParamNames(const ir::Layout &layout, const ir::Endpoint &endpoint, const std::vector<Location> &declaredAt,
                     const std::vector<std::string> &titles, Diagnostics &diagnostics);

/// Reports tensors of one name. `tensors`: name pattern, variables and existing values of each, tied ones too.
void checkTensorNames(const ir::Layout &layout, const std::vector<ir::TensorPattern> &tensors,
                      const std::vector<Location> &declaredAt, Diagnostics &diagnostics);

} // namespace reshard
