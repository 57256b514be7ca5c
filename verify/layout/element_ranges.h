// SPDX-License-Identifier: Apache-2.0
// The reference model of every check: which tensor element each position of a param instance holds
// (schema/element_ranges.h), within the deadline of a command's work.
#pragma once

#include "schema/element_ranges.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::analysis {

using schema::ElementRange;
using schema::InstanceLayout;
using schema::PartGrid;
using schema::rankClassKey;

/// Calls visit(grid) for every part of an instance, and for every tensor of a part that stacks several of them. Grids
/// are collapsed.
void forEachPartGrid(const InstanceLayout &layout, const std::function<void(const PartGrid &)> &visit);

/// Calls visit(range) for all elements of an instance that a part covers, part by part.
void forEachRange(const InstanceLayout &layout, const std::function<void(const ElementRange &)> &visit);

/// Places [first, first + count) of an instance.
struct Places {
  int64_t first, count;
};
/// The parts of an instance in the order of their places, for visits of a few places at a time.
class PartsByPlace {
public:
  explicit PartsByPlace(const InstanceLayout &layout);
  PartsByPlace(const PartsByPlace &) = delete; // grids point to the names of their entries
  PartsByPlace &operator=(const PartsByPlace &) = delete;
  /// Calls visit(range) for the elements at these places that a part covers.
  void forEachRange(Places places, const std::function<void(const ElementRange &)> &visit) const;

private:
  struct Entry {
    PartGrid grid; // its tensor is `tensor`
    std::string tensor;
    int64_t first, end; // its places lie in [first, end)
    int64_t reach;      // the greatest `end` of this entry and those before
  };
  std::vector<Entry> entries_; // by `first`
};

/// Which elements of an instance its parts have covered.
class Coverage {
public:
  explicit Coverage(int64_t elements) : elements_(elements), words_(static_cast<size_t>((elements + 63) / 64)) {}
  void add(const ElementRange &range);
  int64_t missing() const;
  int64_t elements() const { return elements_; }

private:
  int64_t elements_;
  std::vector<uint64_t> words_;
};

Coverage coverageOf(const InstanceLayout &layout);

/// schema::meshRankText() of a mesh rank.
std::string meshRankName(const schema::Endpoint &endpoint, uint32_t meshRank);

} // namespace reshard::analysis
