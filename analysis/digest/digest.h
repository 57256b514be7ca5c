// SPDX-License-Identifier: Apache-2.0
// Digests of tensors that do not depend on how the tensors are distributed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace reshard::analysis {

/// The digest of a set of elements: two sums, modulo 2^64, of a mixture of each element's bits and its row-major index
/// in the tensor. The digest of a tensor is the sum of those of any partition of it. It finds accidents, not attacks.
struct TensorDigest {
  std::array<uint64_t, 2> sums = {0, 0};

  void add(const TensorDigest &other) {
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] += other.sums[i];
  }
  /// Adds `count` elements of `item` bytes (1, 2, 4 or 8) that follow each other in memory and whose indices are
  /// `first`, `first + step`, …. Elements need no alignment.
  void add(const std::byte *data, size_t item, uint64_t first, uint64_t step, uint64_t count);
  /// 32 hexadecimal digits.
  std::string text() const;
  friend bool operator==(const TensorDigest &, const TensorDigest &) = default;
};

} // namespace reshard::analysis
