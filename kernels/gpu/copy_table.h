// SPDX-License-Identifier: Apache-2.0
// Builds tables of strided copies, and of memory whose digests are computed.
#pragma once

#include "kernels/gpu/copy_kernel.h"
#include "kernels/gpu/digest_kernel.h"
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

/// The digests of one launch.
class DigestTable {
public:
  /// Adds memory to digest `number`. The target side of the shape is the tensor: `position` is the row-major byte of
  /// the shape's first row in it. No byte of a tensor may be added twice.
  void add(uint32_t number, uint64_t position, uint64_t memory, const Strided &shape) {
    units_.add(position, memory, shape);
    numbers_.resize(units_.entries().size() - 1, number);
    digests_ = std::max(digests_, number + 1);
  }

  bool empty() const { return units_.empty(); }
  /// One more than the greatest number.
  uint32_t digests() const { return digests_; }
  const CopyTable &units() const { return units_; }
  const std::vector<uint32_t> &numbers() const { return numbers_; }
  /// The table in host memory; valid until the next add. `sums`: two for each digest.
  DigestTableView view(uint64_t *sums) const { return {units_.view(), numbers_.data(), &kPlaceKeys, sums}; }

private:
  CopyTable units_;
  std::vector<uint32_t> numbers_; // by entry of `units_`
  uint32_t digests_ = 0;
};

} // namespace reshard::kernels
