// Copies of strided bytes whose elements are cast on their way.
#pragma once

#include "kernels/formats.h"
#include "kernels/strided.h"

namespace reshard::kernels {

/// From which format to which; none where they are equal.
struct Cast {
  Format from = Format::fp32, to = Format::fp32;

  explicit operator bool() const { return from != to; }
  bool operator==(const Cast &) const = default;
  /// Bytes of the target, by bytes of the source; of whole elements.
  int64_t scale(int64_t bytes) const { return bytes / static_cast<int64_t>(itemBytes(from)) * static_cast<int64_t>(itemBytes(to)); }
};

/// Elements side by side, `bytes` of the source. They are rounded to nearest, ties to even; what an 8-bit format cannot hold saturates.
void castRow(std::byte *target, const std::byte *source, uint64_t bytes, const Cast &cast, bool stream = false);

/// As copyRows; rowBytes and source strides are of the source, target strides of the target.
void castRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count, const Cast &cast, bool stream = false);

} // namespace reshard::kernels
