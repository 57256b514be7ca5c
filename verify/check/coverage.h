// SPDX-License-Identifier: Apache-2.0
// Which elements of an instance its parts cover, and the parts at a few places of it.
#pragma once

#include "schema/element_ranges.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::verify {

/// Places [first, first + count) of an instance.
struct Places {
  int64_t first, count;
};
/// The parts of an instance in the order of their places, for visits of a few places at a time.
class PartsByPlace {
public:
  explicit PartsByPlace(const schema::InstanceLayout &layout);
  PartsByPlace(const PartsByPlace &) = delete; // grids point to the names of their entries
  PartsByPlace &operator=(const PartsByPlace &) = delete;
  /// Calls visit(range) for the elements at these places that a part covers.
  void forEachRange(Places places, const std::function<void(const schema::ElementRange &)> &visit) const;

private:
  struct Entry {
    schema::PartGrid grid; // its tensor is `tensor`
    std::string tensor;
    int64_t first, end; // its places lie in [first, end)
    int64_t reach;      // the greatest `end` of this entry and those before
  };
  std::vector<Entry> entries_; // by `first`
};

/// The elements of an instance that its parts have covered.
class Coverage {
public:
  explicit Coverage(int64_t elements) : elements_(elements), words_(static_cast<size_t>((elements + 63) / 64)) {}
  void add(const schema::ElementRange &range);
  int64_t missing() const;
  int64_t elements() const { return elements_; }

private:
  int64_t elements_;
  std::vector<uint64_t> words_;
};

Coverage coverageOf(const schema::InstanceLayout &layout);

} // namespace reshard::verify
