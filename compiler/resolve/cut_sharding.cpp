// SPDX-License-Identifier: Apache-2.0
#include "compiler/resolve/cut_sharding.h"

#include <map>
#include <utility>

namespace reshard {

using ir::IndexMap;

namespace {

/// The positions of an interval, numbered from 0.
IndexMap numbered(const Interval &interval) {
  return interval.begin == interval.end ? IndexMap{}
                                        : IndexMap{{interval.begin, 0, interval.end - interval.begin, 1, 0, 0}};
}

} // namespace

unsigned cutSharding(EndpointContext &context, unsigned sharding, const std::vector<Interval> &intervals, unsigned axis,
                     bool padding) {
  const ir::Sharding old = context.endpoint().shardings[sharding];
  ir::Sharding result{{axis}, std::vector<IndexMap>(intervals.size()), 1};
  std::map<std::pair<int64_t, int64_t>, IndexMap> known; // intervals can be equal
  for (size_t i = 0; i < intervals.size(); ++i) {
    const auto [at, added] = known.try_emplace({intervals[i].begin, intervals[i].end});
    if (added) {
      at->second = compose(old.at[0], numbered(intervals[i]));
      for (ir::IndexBlock &block : at->second)
        if (padding) {
          block.from = block.to;
          block.fromStep = block.toStep;
        }
      if (padding)
        at->second = ir::normalize(std::move(at->second));
    }
    result.at[i] = at->second;
  }
  return context.intern(std::move(result));
}

} // namespace reshard
