// SPDX-License-Identifier: Apache-2.0
// Digests of tensors that do not depend on how the tensors are distributed.
#pragma once

#include "kernels/cpu/streaming_stores.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace reshard::kernels {

/// The digest of a set of elements: two sums modulo 2^64. The digest of a tensor is the sum of those of any partition
/// of it.
///
/// All bytes of the tensor, row-major, are read as little-endian words of 32 bits. Word w contributes
/// word * placeKey(w % kBlockWords) * blockKey(w / kBlockWords) to each sum, with keys of its own for each. So a digest
/// depends on the bits of elements and their row-major indices alone, and a part of a word contributes on its own. A
/// wrong word, two exchanged words of one block, and all errors within one word change the digest for certain, others
/// except with a probability of about 2^-64. Elements whose bits are all zero contribute nothing. It finds accidents,
/// not attacks.
struct TensorDigest {
  std::array<uint64_t, 2> sums = {0, 0};

  void add(const TensorDigest &other) {
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] += other.sums[i];
  }
  /// Adds `count` elements of `item` bytes (1, 2, 4 or 8), whose row-major indices are `first`, `first + 1`, …. In
  /// memory, elements follow each other at `step` bytes; they need no alignment. `level` must not be above cpuLevel();
  /// all levels give the same sums.
  void add(const std::byte *data, size_t item, int64_t step, uint64_t first, uint64_t count,
           CpuLevel level = cpuLevel());
  /// Elements of a matrix that lies transposed in memory: those of a row are `step` bytes apart, those of a column are
  /// adjacent.
  struct Transposed {
    uint64_t rows, columns;
    int64_t step;
    uint64_t first, rowIndices; // row-major index of the first element, and from row to row
  };
  /// Adds the elements of such a matrix.
  void add(const std::byte *data, size_t item, const Transposed &matrix, CpuLevel level = cpuLevel());
  /// 32 hexadecimal digits.
  std::string text() const;
  friend bool operator==(const TensorDigest &, const TensorDigest &) = default;

private:
  void addBytes(const std::byte *data, uint64_t begin, uint64_t bytes, CpuLevel level);
};

} // namespace reshard::kernels
