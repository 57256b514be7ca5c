// SPDX-License-Identifier: Apache-2.0
#include "verify/check/coverage.h"

#include "base/work_deadline.h"

#include <algorithm>
#include <bit>

namespace reshard::verify {

using namespace schema;

PartsByPlace::PartsByPlace(const InstanceLayout &layout) {
  forEachCollapsedGrid(layout, [&](const PartGrid &grid) {
    if (grid.elements() == 0)
      return;
    const auto [first, end] = grid.places();
    entries_.push_back({grid, grid.tensor ? *grid.tensor : std::string(), first, end, end});
  });
  std::stable_sort(entries_.begin(), entries_.end(), [](const Entry &a, const Entry &b) { return a.first < b.first; });
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].grid.tensor)
      entries_[i].grid.tensor = &entries_[i].tensor;
    if (i > 0)
      entries_[i].reach = std::max(entries_[i].end, entries_[i - 1].reach);
  }
}

void PartsByPlace::forEachRange(Places places, const std::function<void(const ElementRange &)> &visit) const {
  const int64_t end = places.first + places.count;
  const auto begin = std::partition_point(entries_.begin(), entries_.end(),
                                          [&](const Entry &entry) { return entry.reach <= places.first; });
  for (auto entry = begin; entry != entries_.end() && entry->first < end; ++entry) {
    WorkDeadline::spend(1);
    if (entry->end <= places.first)
      continue;
    forEachRangeOf(entry->grid, [&](const ElementRange &range) {
      // The elements [skipped, taken) of the range: those from its first place on, and before the end.
      const int64_t step = std::max<int64_t>(range.localStep, 1);
      const auto before = [&](int64_t place) {
        return std::clamp<int64_t>((place - range.local + step - 1) / step, 0, range.count);
      };
      WorkDeadline::spend(1);
      const int64_t skipped = before(places.first), taken = before(end);
      if (skipped >= taken)
        return;
      ElementRange part = range.at(skipped);
      part.count = taken - skipped;
      WorkDeadline::spend(part.count);
      visit(part);
    });
  }
}

void Coverage::add(const ElementRange &range) {
  if (range.localStep != 1) {
    for (int64_t k = 0; k < range.count; ++k) {
      const int64_t element = range.local + k * range.localStep;
      words_[static_cast<size_t>(element / 64)] |= uint64_t{1} << (element % 64);
    }
    return;
  }
  for (int64_t at = range.local, end = range.local + range.count; at < end;) {
    const int64_t bit = at % 64, take = std::min(64 - bit, end - at);
    words_[static_cast<size_t>(at / 64)] |= (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1) << bit;
    at += take;
  }
}

int64_t Coverage::missing() const {
  int64_t left = elements_;
  for (const uint64_t word : words_)
    left -= std::popcount(word);
  return left;
}

Coverage coverageOf(const InstanceLayout &layout) {
  const Param &param = *layout.endpoint.params()->Get(layout.instance.param);
  Coverage coverage(layout.instance.bytes / itemBytes(storageDtypeOf(param)));
  schema::forEachRange(layout, [&](const ElementRange &range) { coverage.add(range); });
  return coverage;
}

} // namespace reshard::verify
