// SPDX-License-Identifier: Apache-2.0
// The positions at which flows of descriptors may be cut.
#pragma once

#include "compiler/schedule/rounds.h"
#include "compiler/transfer/staging.h"

#include <algorithm>
#include <vector>

namespace reshard {

/// Cuts flows between rows if rows are small, else at multiples of the staging alignment, else between elements.
class DescriptorCuts : public Cuts {
public:
  /// `count`: how many descriptors will be added. `listOf`: by flow, the number of its list of descriptors, from
  /// `firstList` on; empty: each flow has its own.
  explicit DescriptorCuts(size_t count, llvm::ArrayRef<uint32_t> listOf = {}, uint32_t firstList = 0)
      : listOf_(listOf), firstList_(firstList) {
    ranges_.reserve(count);
  }

  /// Appends a descriptor to the current list. `row`: bytes of a row; `block`: bytes of a quantization block, inside
  /// which it is not cut, or 0.
  void add(int64_t bytes, int64_t row, int64_t block) {
    const int64_t begin = ranges_.size() == firsts_.back() ? 0 : ranges_.back().end;
    ranges_.push_back(
        {begin, begin + bytes, row,
         block > 0 ? block : std::min<int64_t>(row & -row, 16)}); // an element has a power of two bytes, 16 at most
  }
  /// The next descriptor belongs to the next list.
  void endList() { firsts_.push_back(ranges_.size()); }

  bool possible(uint32_t flow, int64_t at) const override {
    const Range &range = rangeOf(flow, at);
    return (at - range.begin) % range.granule == 0;
  }

  int64_t best(uint32_t flow, int64_t from, int64_t to) const override {
    const Range &range = rangeOf(flow, to);
    for (int64_t step : {range.row <= (to - from) / 8 ? range.row : kStagingAlignment, range.granule})
      if (const int64_t position = range.begin + (to - range.begin) / step * step; position > from)
        return position;
    return from;
  }

private:
  /// Bytes [begin, end) of a flow: one descriptor. It is cut only at multiples of `granule` bytes after `begin`.
  struct Range {
    int64_t begin, end, row, granule;
  };
  const Range &rangeOf(uint32_t flow, int64_t at) const {
    const uint32_t list = listOf_.empty() ? flow : listOf_[flow] - firstList_;
    return *std::lower_bound(ranges_.begin() + static_cast<ptrdiff_t>(firsts_[list]),
                             ranges_.begin() + static_cast<ptrdiff_t>(firsts_[list + 1]), at,
                             [](const Range &range, int64_t to) { return range.end < to; });
  }

  llvm::ArrayRef<uint32_t> listOf_;
  uint32_t firstList_;
  std::vector<Range> ranges_; // list after list
  std::vector<size_t> firsts_ = {0};
};

} // namespace reshard
