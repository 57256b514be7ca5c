// SPDX-License-Identifier: Apache-2.0
// Builds a table of strided copies.
#pragma once

#include "kernels/gpu/copy_kernel.h"
#include "kernels/kernels.h"

#include <vector>

namespace reshard::kernels {

/// Returns the index of a shape with rows of this many units: the last shape if it is equal, else a new one.
uint32_t shapeNumber(std::vector<TableShape> &shapes, std::vector<TableLoop> &loops, const Strided &shape,
                     uint64_t units);

/// The copies of one launch. No target byte may be written twice, and no byte may be both read and written.
class CopyTable {
public:
  /// Shapes of `maxUnits` units or more are split: units are numbered in 32 bits, and a thread computes numbers beyond
  /// the last unit.
  explicit CopyTable(uint64_t maxUnits = uint64_t{1} << 31) : maxUnits_(maxUnits) {}

  /// Appends bytes [first, first + bytes) of a shape, numbered along rows, the innermost loop fastest. Addresses are
  /// those of the shape's first row; source 0 means zeros, and the source strides are then ignored.
  void add(uint64_t target, uint64_t source, const Strided &shape, uint64_t first, uint64_t bytes);
  void add(uint64_t target, uint64_t source, const Strided &shape) { add(target, source, shape, 0, shape.bytes()); }

  bool empty() const { return bytes_ == 0; }
  uint64_t bytes() const { return bytes_; }

  /// The table in host memory; valid until the next add. A sentinel entry follows the last one.
  CopyTableView view() const {
    return {entries_.data(), shapes_.data(), loops_.data(), entries_.back().slot,
            static_cast<uint32_t>(entries_.size() - 1)};
  }
  const std::vector<CopyEntry> &entries() const { return entries_; }
  const std::vector<TableShape> &shapes() const { return shapes_; }
  const std::vector<TableLoop> &loops() const { return loops_; }

private:
  void addAligned(uint64_t target, uint64_t source, const Strided &shape, uint64_t first, uint64_t bytes);

  std::vector<CopyEntry> entries_{{0, 0, 0, 0, 0, 0, 0}}; // the last one is the sentinel
  std::vector<TableShape> shapes_;
  std::vector<TableLoop> loops_;
  uint64_t maxUnits_, bytes_ = 0;
};

} // namespace reshard::kernels
