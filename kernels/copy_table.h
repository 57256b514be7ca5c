// Builds a table of descriptors.
#pragma once

#include "kernels/copy_kernel.h"
#include "kernels/kernels.h"

#include <vector>

namespace reshard::kernels {

/// The number of a shape with rows of so many units: that of the last one where both are alike, or one that is
/// appended.
uint32_t shapeNumber(std::vector<TableShape> &shapes, std::vector<TableLoop> &loops, const Strided &shape,
                     uint64_t units);

/// What one launch copies. No two bytes of it may be written to one place, and none may be read that it writes.
class CopyTable {
public:
  /// Pieces of a shape of `maxUnits` units and more are cut: units are numbered in 32 bits, and a thread looks some
  /// ahead.
  explicit CopyTable(uint64_t maxUnits = uint64_t{1} << 31) : maxUnits_(maxUnits) {}

  /// Appends bytes [first, first + bytes) of a shape, numbered along rows, the innermost loop fastest. Addresses are of
  /// the shape's first row, source 0: zeros. The source strides of a fill count for nothing.
  void add(uint64_t target, uint64_t source, const Strided &shape, uint64_t first, uint64_t bytes);
  void add(uint64_t target, uint64_t source, const Strided &shape) { add(target, source, shape, 0, shape.bytes()); }

  bool empty() const { return bytes_ == 0; }
  uint64_t bytes() const { return bytes_; }

  /// The table in host memory, as long as nothing is added. One piece stands behind the others.
  CopyTableView view() const {
    return {entries_.data(), shapes_.data(), loops_.data(), entries_.back().slot,
            static_cast<uint32_t>(entries_.size() - 1)};
  }
  const std::vector<CopyEntry> &entries() const { return entries_; }
  const std::vector<TableShape> &shapes() const { return shapes_; }
  const std::vector<TableLoop> &loops() const { return loops_; }

private:
  void addAligned(uint64_t target, uint64_t source, const Strided &shape, uint64_t first, uint64_t bytes);

  std::vector<CopyEntry> entries_{{0, 0, 0, 0, 0, 0, 0}}; // the last one ends the others
  std::vector<TableShape> shapes_;
  std::vector<TableLoop> loops_;
  uint64_t maxUnits_, bytes_ = 0;
};

} // namespace reshard::kernels
