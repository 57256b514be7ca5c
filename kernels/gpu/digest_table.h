// SPDX-License-Identifier: Apache-2.0
// Builds a table of memory whose digests are computed.
#pragma once

#include "kernels/gpu/copy_table.h"
#include "kernels/gpu/digest_kernel.h"

namespace reshard::kernels {

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
