// SPDX-License-Identifier: Apache-2.0
// The shardings of a dimension that lies whole on one mesh rank, cut into pieces.
#pragma once

#include "compiler/resolve/endpoint_context.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// Positions [begin, end) of a dimension.
struct Interval {
  int64_t begin = 0, end = 0;
};

/// The number of the sharding of a dimension, restricted to an interval at each coordinate of an axis. An empty
/// interval has no positions. `sharding`: has one coordinate. `padding`: only local positions have a meaning.
unsigned cutSharding(EndpointContext &context, unsigned sharding, const std::vector<Interval> &intervals, unsigned axis,
                     bool padding);

} // namespace reshard
