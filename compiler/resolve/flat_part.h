// SPDX-License-Identifier: Apache-2.0
// A tensor in a flat buffer, and its cuts: at the ends of a rank's range, or of a stored chunk.
#pragma once

#include "compiler/resolve/endpoint_context.h"
#include "ir/ir.h"

#include <cstdint>
#include <utility>
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

/// Positions [begin, end) of a flat buffer.
struct FlatInterval {
  int64_t begin = 0, end = 0;
};

/// Whether a part lies in a flat buffer: its positions there are sums of positions of several dimensions.
bool sumsPositions(const ir::Part &part);

/// For each dimension of a part: logical position -> offset in the buffer. An element lies at the sum of its offsets.
using FlatOffsets = std::vector<ir::IndexMap>;

/// A part of a flat buffer. It is row-major, in any order of its dimensions: a step along a dimension is longer than
/// the spans of all shorter dimensions together.
class FlatPart {
public:
  explicit FlatPart(FlatOffsets offsets);

  /// The elements whose positions are in an interval, as products of the dimensions' maps; positions count from its
  /// begin. A part of d dimensions gives at most 2d - 1 products.
  std::vector<FlatOffsets> within(FlatInterval interval) const;

private:
  class Cutter;

  FlatOffsets offsets_;
  bool empty_ = false;
  std::vector<size_t> order_;         // dimensions, the longest first
  std::vector<int64_t> least_, span_; // the least offset and the span of the i-th and all shorter
                                      // dimensions together
};

/// Appends copies of `part` that together are the whole part, cut: copy b has the b-th product of each interval. A
/// sharding has `coordinates` coordinates over `axes`, of which the first ones are the intervals.
void addCuts(const ir::Part &part, const FlatPart &whole, const std::vector<FlatInterval> &intervals,
             const std::vector<unsigned> &axes, size_t coordinates, EndpointContext &context,
             std::vector<ir::Part> &out);

} // namespace reshard
