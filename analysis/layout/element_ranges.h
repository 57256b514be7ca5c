// SPDX-License-Identifier: Apache-2.0
// The reference model of every check: which tensor element each position of a param instance holds, from the manifest's
// layouts alone. Transfers and steps are not read.
#pragma once

#include "schema/manifest.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::analysis {

/// A param instance on a mesh rank, with the tables that its layout refers to.
struct InstanceLayout {
  const schema::Manifest &manifest;
  const schema::Endpoint &endpoint;
  uint32_t meshRank;
  const schema::ParamInstance &instance;
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
    std::vector<schema::IndexBlock> blocks;
    int64_t logicalStride = 0, localStride = 0; // elements per position
  };
  const std::string *tensor = nullptr; // as in ElementRange
  int pattern = -1;
  int64_t local = 0; // first element of the part, at position 0 of each dimension
  std::vector<Dimension> dimensions;
};

/// Calls visit(grid) for every part of an instance, and for every tensor of a part that stacks several of them.
void forEachPartGrid(const InstanceLayout &layout, const std::function<void(const PartGrid &)> &visit);

/// Calls visit(range) for all elements of an instance that a part covers, part by part.
void forEachRange(const InstanceLayout &layout, const std::function<void(const ElementRange &)> &visit);

/// Identifies the rank class of a param on a mesh rank: the coordinates on which the param's layout depends. Mesh ranks
/// with equal keys hold the same elements.
std::vector<int64_t> rankClassKey(const schema::Endpoint &endpoint, uint32_t param, int64_t meshRank);

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
