// No two params of one place, and no two tensors, may have the same name. Looked at by pattern, not by instance.
#pragma once

#include "compiler/diagnostics.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Reports params of one name on one place, at the place where the later is declared.
void checkParamNames(const ir::Layout &layout, const ir::Endpoint &endpoint, const std::vector<Location> &declaredAt,
                     Diagnostics &diagnostics);

/// Reports tensors of one name. `tensors`: name pattern, variables and existing values of each, tied ones too.
void checkTensorNames(const ir::Layout &layout, const std::vector<ir::Family> &tensors,
                      const std::vector<Location> &declaredAt, Diagnostics &diagnostics);

} // namespace reshard
