// SPDX-License-Identifier: Apache-2.0
// Digests of the elements of a grid in memory, of the host or of a device.
#pragma once

#include "executor/interfaces/device.h"
#include "kernels/cpu/convert_strided.h"
#include "kernels/cpu/tensor_digest.h"
#include "schema/element_ranges.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace reshard {

/// The digest of some elements, and their number. Sums over processes add its numbers modulo 2^64.
struct CountedDigest {
  kernels::TensorDigest digest;
  uint64_t elements = 0;

  void add(const CountedDigest &other) {
    digest.add(other.digest);
    elements += other.elements;
  }
  friend bool operator==(const CountedDigest &, const CountedDigest &) = default;
};

/// The row-major indices [begin, end) of a tensor, in pieces of `length` indices, the last of which may be shorter.
struct Pieces {
  int64_t begin = 0, end = 0, length = 1;
  size_t count() const { return static_cast<size_t>((end - begin + length - 1) / length); }
};

/// Places in an instance.
class PlaceSet {
public:
  /// `elements`: of the instance.
  explicit PlaceSet(int64_t elements) : words_(static_cast<size_t>(elements + 63) / 64) {}
  void add(const schema::PartGrid &grid);
  bool contains(int64_t place) const { return words_[static_cast<size_t>(place / 64)] >> place % 64 & 1; }

private:
  std::vector<uint64_t> words_;
};

/// An instance in memory. A target that stores another format than the one that is sent holds `cast` elements: their
/// digest, computed from a source, is that of the source's elements after the cast.
struct InstanceMemory {
  const std::byte *data; // the element at place `first`
  int64_t first, itemBytes;
  kernels::StorageForm cast; // plain: none
};

/// Adds the elements of a grid whose indices are in `pieces` to the digests of their pieces. `except`: places that do
/// not count; null: none.
void addElements(const schema::PartGrid &grid, const InstanceMemory &memory, const PlaceSet *except,
                 const Pieces &pieces, std::vector<CountedDigest> &digests);

/// The elements of a grid as digest 0 of a table. No value if the grid has more than kMaxTableDimensions dimensions or
/// its positions more than kMaxTableParts parts: then it is faster to copy the memory to the host.
std::optional<kernels::DigestTable> digestTableOf(const schema::PartGrid &grid, const InstanceMemory &memory);
constexpr size_t kMaxTableDimensions = kernels::kMaxLoops / 2;
constexpr size_t kMaxTableParts = 4096;

/// Adds the digest of a table's memory, which has so many elements.
Status addOnDevice(Device &device, const kernels::DigestTable &table, int64_t elements, CountedDigest &to);

} // namespace reshard
