// Params that stand quantised, as layouts: codes and scales are params and tensors like others, and faces stand between
// them and plain values.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "compiler/frontend/frontend.h"

#include <vector>

namespace reshard {

/// Rewrites each param with a `quantize` into the param of its codes, params of scales, and faces (ir::Face); appends
/// what is new, to `paramsAt` and `forms` as well. Where codes and scales go, tensors for them are added. Errors: what
/// docs/yaml.md says cannot be quantised; a warning where `by: sender` cannot be.
void quantizeParams(std::vector<std::vector<Location>> &paramsAt, std::vector<std::vector<StorageForm>> &forms,
                    ir::Layout &layout, Diagnostics &diagnostics);

} // namespace reshard
