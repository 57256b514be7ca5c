// SPDX-License-Identifier: Apache-2.0
#include "compiler/resolve/flat_chunks.h"

#include "ir/index_map.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace reshard {

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

class Cutter {
public:
  Cutter(const FlatShares &part, int64_t begin, int64_t end) : begin_(begin), end_(end), shares_(part) {
    for (const IndexMap &map : part)
      ranges_.push_back(rangeOf(map));
    order_.resize(part.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return ranges_[a].span() > ranges_[b].span(); });
    least_.assign(part.size() + 1, 0);
    span_.assign(part.size() + 1, 0);
    for (size_t i = part.size(); i-- > 0;) {
      least_[i] = least_[i + 1] + ranges_[order_[i]].least;
      span_[i] = span_[i + 1] + ranges_[order_[i]].span();
    }
  }

  std::vector<FlatShares> cut() {
    if (std::none_of(shares_.begin(), shares_.end(), [](const IndexMap &map) { return map.empty(); }))
      descend(0, 0);
    return std::move(result_);
  }

private:
  /// Positions along the i-th longest dimension with all shorter steps inside the range make one product. Those with
  /// some inside, at most one at either end, are cut along the next dimension. `at`: the position so far.
  void descend(size_t i, int64_t at) {
    if (i == order_.size()) {
      add();
      return;
    }
    IndexMap &share = shares_[order_[i]];
    const IndexMap all = share;
    const int64_t first = at + least_[i + 1], last = first + span_[i + 1];
    const int64_t whole = begin_ - first, wholeEnd = end_ - last;
    const auto some = [&](int64_t from, int64_t to) {
      const IndexMap cut = restricted(all, from, to);
      for (const IndexBlock &block : cut)
        for (int64_t k = 0; k < block.count; ++k)
          for (int64_t l = 0; l < block.length; ++l) {
            const int64_t position = block.to + k * block.toStep + l;
            share = {{block.from + k * block.fromStep + l, position, 1, 1, 0, 0}};
            descend(i + 1, at + position);
          }
    };
    some(begin_ - last, whole);
    share = restricted(all, whole, wholeEnd);
    if (!share.empty())
      add();
    some(std::max(whole, wholeEnd), end_ - first);
    share = all;
  }

  /// Adds the product of shares_. Each share counts from its least position, the first from that of the product.
  void add() {
    FlatShares product = shares_;
    int64_t base = -begin_;
    for (IndexMap &map : product) {
      const int64_t least = rangeOf(map).least;
      base += least;
      for (IndexBlock &block : map)
        block.to -= least;
    }
    for (IndexBlock &block : product[0])
      block.to += base;
    result_.push_back(std::move(product));
  }

  const int64_t begin_, end_;
  FlatShares shares_;
  std::vector<Range> ranges_;
  std::vector<size_t> order_;         // dimensions, the longest first
  std::vector<int64_t> least_, span_; // of the i-th and all shorter dimensions together
  std::vector<FlatShares> result_;
};

} // namespace

std::vector<FlatShares> within(const FlatShares &part, int64_t begin, int64_t end) {
  return Cutter(part, begin, end).cut();
}

} // namespace reshard
