// Where streams of descriptors may be cut.
#pragma once

#include "compiler/rounds.h"
#include "compiler/staging.h"

#include <algorithm>
#include <vector>

namespace reshard {

/// Streams are cut between rows where these are small, else at a multiple of the alignment, at least of an element.
class DescriptorCuts : public Cuts {
public:
  /// `block`: what stays together, or 0.
  void add(int64_t bytes, int64_t row, int64_t block) {
    const int64_t begin = spans_.size() == firsts_.back() ? 0 : spans_.back().end;
    spans_.push_back(
        {begin, begin + bytes, row,
         block > 0 ? block : std::min<int64_t>(row & -row, 16)}); // rows are whole elements, of a power of two bytes
  }
  void endStream() { firsts_.push_back(spans_.size()); }

  bool possible(uint32_t stream, int64_t at) const override {
    const Span &span = spanOf(stream, at);
    return (at - span.begin) % span.element == 0;
  }

  int64_t best(uint32_t stream, int64_t from, int64_t to) const override {
    const Span &span = spanOf(stream, to);
    for (int64_t step : {span.row <= (to - from) / 8 ? span.row : kStagingAlignment, span.element})
      if (const int64_t place = span.begin + (to - span.begin) / step * step; place > from)
        return place;
    return from;
  }

private:
  /// Bytes [begin, end) of one descriptor; `element`: what is not cut.
  struct Span {
    int64_t begin, end, row, element;
  };
  const Span &spanOf(uint32_t stream, int64_t at) const {
    return *std::lower_bound(spans_.begin() + static_cast<ptrdiff_t>(firsts_[stream]),
                             spans_.begin() + static_cast<ptrdiff_t>(firsts_[stream + 1]), at,
                             [](const Span &span, int64_t to) { return span.end < to; });
  }

  std::vector<Span> spans_; // stream after stream
  std::vector<size_t> firsts_ = {0};
};

} // namespace reshard
