// SPDX-License-Identifier: Apache-2.0
// Cuts a flat part dimension by dimension, the longest first: the positions whose rest lies inside the interval as a
// whole make one product, and the positions at its ends are cut along the next dimension.
#include "compiler/resolve/flat_part.h"

#include "ir/index_map.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
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

using ir::IndexBlock;
using ir::IndexMap;

namespace {

/// The least and the greatest `to` position.
struct Range {
  int64_t least = std::numeric_limits<int64_t>::max(), greatest = std::numeric_limits<int64_t>::min();
  int64_t span() const { return greatest - least; }
};

Range rangeOf(const IndexMap &map) {
  Range range;
  for (const IndexBlock &block : map) {
    const int64_t last = block.to + (block.count - 1) * block.toStep;
    range.least = std::min({range.least, block.to, last});
    range.greatest = std::max({range.greatest, block.to + block.length - 1, last + block.length - 1});
  }
  return range;
}

/// The positions of a map whose `to` is in [begin, end).
IndexMap restricted(const IndexMap &map, int64_t begin, int64_t end) {
  begin = std::max<int64_t>(begin, 0);
  return begin < end ? compose(map, {{begin, begin, end - begin, 1, 0, 0}}) : IndexMap();
}

} // namespace

bool sumsPositions(const ir::Part &part) {
  std::set<int> seen;
  return std::any_of(part.dimensions.begin(), part.dimensions.end(), [&](const ir::PartDimension &dimension) {
    return dimension.param >= 0 && !seen.insert(dimension.param).second;
  });
}

FlatPart::FlatPart(FlatOffsets offsets) : offsets_(std::move(offsets)) {
  std::vector<Range> ranges;
  for (const IndexMap &map : offsets_) {
    empty_ = empty_ || map.empty();
    ranges.push_back(rangeOf(map));
  }
  if (empty_)
    return;
  order_.resize(offsets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](size_t a, size_t b) { return ranges[a].span() > ranges[b].span(); });
  least_.assign(offsets_.size() + 1, 0);
  span_.assign(offsets_.size() + 1, 0);
  for (size_t i = offsets_.size(); i-- > 0;) {
    least_[i] = least_[i + 1] + ranges[order_[i]].least;
    span_[i] = span_[i + 1] + ranges[order_[i]].span();
  }
}

/// One cut.
class FlatPart::Cutter {
public:
  Cutter(const FlatPart &part, FlatInterval interval) : part_(part), interval_(interval), offsets_(part.offsets_) {}

  std::vector<FlatOffsets> cut() {
    descend(0, 0);
    return std::move(result_);
  }

private:
  /// Positions along the i-th longest dimension with all shorter steps inside the interval make one product. Those with
  /// some inside, at most one at either end, are cut along the next dimension. `at`: the position so far.
  void descend(size_t i, int64_t at) {
    if (i == offsets_.size()) {
      add();
      return;
    }
    IndexMap &offset = offsets_[part_.order_[i]];
    const IndexMap all = offset;
    const int64_t first = at + part_.least_[i + 1], last = first + part_.span_[i + 1];
    const int64_t whole = interval_.begin - first, wholeEnd = interval_.end - last;
    const auto some = [&](int64_t from, int64_t to) {
      const IndexMap cut = restricted(all, from, to);
      for (const IndexBlock &block : cut)
        for (int64_t k = 0; k < block.count; ++k)
          for (int64_t l = 0; l < block.length; ++l) {
            const int64_t position = block.to + k * block.toStep + l;
            offset = {{block.from + k * block.fromStep + l, position, 1, 1, 0, 0}};
            descend(i + 1, at + position);
          }
    };
    some(interval_.begin - last, whole);
    offset = restricted(all, whole, wholeEnd);
    if (!offset.empty())
      add();
    some(std::max(whole, wholeEnd), interval_.end - first);
    offset = all;
  }

  /// Adds the product of offsets_. Its maps count from 0; the map of the longest dimension adds the position at which
  /// the product begins in the interval.
  void add() {
    FlatOffsets product = offsets_;
    int64_t base = -interval_.begin;
    for (IndexMap &map : product) {
      const int64_t least = rangeOf(map).least;
      base += least;
      for (IndexBlock &block : map)
        block.to -= least;
    }
    for (IndexBlock &block : product[part_.order_[0]])
      block.to += base;
    result_.push_back(std::move(product));
  }

  const FlatPart &part_;
  const FlatInterval interval_;
  FlatOffsets offsets_;
  std::vector<FlatOffsets> result_;
};

std::vector<FlatOffsets> FlatPart::within(FlatInterval interval) const {
  const bool apart = empty_ || offsets_.empty() || interval.end <= least_[0] || interval.begin > least_[0] + span_[0];
  return apart ? std::vector<FlatOffsets>() : Cutter(*this, interval).cut();
}

void addCuts(const ir::Part &part, const FlatPart &whole, const std::vector<FlatInterval> &intervals,
             const std::vector<unsigned> &axes, size_t coordinates, EndpointContext &context,
             std::vector<ir::Part> &out) {
  std::vector<std::vector<FlatOffsets>> products; // by interval
  size_t most = 0;
  for (const FlatInterval &interval : intervals) {
    products.push_back(whole.within(interval));
    most = std::max(most, products.back().size());
  }
  for (size_t b = 0; b < most; ++b) {
    ir::Part &cut = out.emplace_back(part);
    size_t factor = 0;
    for (ir::PartDimension &dimension : cut.dimensions) {
      if (dimension.param < 0)
        continue;
      ir::Sharding sharding{axes, std::vector<IndexMap>(coordinates), 1};
      for (size_t i = 0; i < products.size(); ++i)
        if (b < products[i].size())
          sharding.at[i] = products[i][b][factor];
      ++factor;
      dimension.sharding = context.intern(std::move(sharding));
    }
  }
}

} // namespace reshard
