// SPDX-License-Identifier: Apache-2.0
// Which tensor element each position of a param instance holds, from the manifest's layouts alone. Transfers and steps
// are not read.
#pragma once

#include "schema/manifest.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reshard::schema {

/// A param instance on a mesh rank, with the tables that its layout refers to.
struct InstanceLayout {
  const Manifest &manifest;
  const Endpoint &endpoint;
  uint32_t meshRank;
  const ParamInstance &instance;
};

/// Elements of one tensor, or padding, at constant steps in the tensor and in an instance.
struct ElementRange {
  const std::string *tensor = nullptr; // full name; null: padding
  int pattern = -1;                    // its pattern
  int64_t logical = 0;                 // first row-major index in the logical tensor
  int64_t logicalStep = 1;             // from one element to the next
  int64_t local = 0;                   // first element in the instance
  int64_t localStep = 1;
  int64_t count = 0;

  /// The k-th element as a range of its own.
  ElementRange at(int64_t k) const {
    return {tensor, pattern, logical + k * logicalStep, logicalStep, local + k * localStep, localStep, 1};
  }
};

/// The elements that a part of a param holds of one tensor (or padding), in one instance: one element for each
/// combination of positions, one position of each dimension.
struct PartGrid {
  /// Positions as blocks of (logical, local) pairs.
  struct Dimension {
    std::vector<IndexBlock> blocks;
    int64_t logicalStride = 0, localStride = 0; // elements per position
    int64_t positions() const;
  };
  const std::string *tensor = nullptr; // as in ElementRange
  int pattern = -1;
  uint32_t part = 0;                            // its number in the param
  const std::vector<int64_t> *values = nullptr; // what the pattern's index variables are; valid during the visit
  int64_t local = 0;                            // first element of the part, at position 0 of each dimension
  std::vector<Dimension> dimensions;

  int64_t elements() const;
  /// The places [first, second) of the instance that contain all its elements; not for grids without elements.
  std::pair<int64_t, int64_t> places() const;
  /// Merges the last two dimensions as long as the last one is held whole: longer ranges are processed faster.
  void collapse();
};

/// Calls visit(grid) for every part of an instance, and for every tensor of a part that stacks several of them. Grids
/// of tensors have the dimensions of the tensor. Counts as work of a command (base/work_deadline.h), as the two below.
void forEachGrid(const InstanceLayout &layout, const std::function<void(const PartGrid &)> &visit);
/// The same, with collapsed grids.
void forEachCollapsedGrid(const InstanceLayout &layout, const std::function<void(const PartGrid &)> &visit);
/// Calls visit(range) for all elements of an instance that a part covers, part by part.
void forEachRange(const InstanceLayout &layout, const std::function<void(const ElementRange &)> &visit);

/// Calls visit(range) for all elements of a grid, along its last dimension: in a tensor they follow each other.
void forEachRangeOf(const PartGrid &grid, const std::function<void(const ElementRange &)> &visit);

/// The elements that two grids of one tensor, which have its dimensions, both hold; their places are those of `a`. No
/// value if there are none.
std::optional<PartGrid> overlap(const PartGrid &a, const PartGrid &b);

} // namespace reshard::schema
