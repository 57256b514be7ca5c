// SPDX-License-Identifier: Apache-2.0
// Cuts a part of a flat buffer at positions of the buffer.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

/// By dimension of a part: logical position -> its share of the position in the buffer.
using FlatShares = std::vector<ir::IndexMap>;

/// The elements of a part whose positions in the buffer are in [begin, end), as products of shares; positions count
/// from `begin`. The part is row-major, in any order of its dimensions: a step along a dimension is longer than
/// the spans of all shorter dimensions together. So a part of d dimensions gives at most 2d - 1 products.
std::vector<FlatShares> within(const FlatShares &part, int64_t begin, int64_t end);

} // namespace reshard
