// SPDX-License-Identifier: Apache-2.0
// Quantized params in the layout IR: codes and scales are params and tensors like others, and quantized views convert
// between them and elements.
#pragma once

#include "base/yaml/diagnostics.h"
#include "compiler/frontend/frontend.h"

#include <string>
#include <vector>

namespace reshard {

/// The name of a param that is stored for the quantized param `name`: replaces {name} in a pattern of its rule.
std::string quantizedName(const std::string &pattern, const std::string &name);

/// Replaces each param with a `quantize` by the param of its codes, and appends the params of its scales and its
/// quantized views (ir::QuantizedView), to `paramsAt` and `forms` as well. Adds tensors for codes and scales that are
/// sent. Reports params that cannot be quantized (docs/yaml.md, section 12); warns if `by: sender` is not possible.
void quantizeParams(std::vector<std::vector<Location>> &paramsAt, std::vector<std::vector<StorageRule>> &forms,
                    ir::Layout &layout, Diagnostics &diagnostics);

} // namespace reshard
