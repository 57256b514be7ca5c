// SPDX-License-Identifier: Apache-2.0
// Strided copies that convert elements: the bytes that are sent have one format, the bytes in memory another.
#pragma once

#include "kernels/cpu/quantized.h"
#include "kernels/kernels.h"

namespace reshard::kernels {

/// How the stored bytes of a param differ from the bytes that are sent.
struct StorageForm {
  /// cast: elements of another format; write only. elements: elements of quantized matrices. codes: codes of matrices
  /// that are stored as plain elements; read only.
  enum class Kind : uint8_t { plain, cast, elements, codes };
  Kind kind = Kind::plain;
  NumberFormat sent = NumberFormat::fp32, stored = NumberFormat::fp32;
  uint64_t block = 1;                          ///< bytes, as sent, that must be written together
  OverflowRule overflow = OverflowRule::error; ///< what a cast does beyond the range
  uint32_t *overflowed = nullptr;              ///< a cast with rule `error` sets it to 1 if a value is beyond the range

  explicit operator bool() const { return kind != Kind::plain; }
  bool operator==(const StorageForm &) const = default;
  uint64_t item() const { return kind == Kind::plain ? 1 : itemBytes(sent); }
  /// Converts a count of bytes as sent to bytes in memory; whole elements only. An element of a quantized matrix counts
  /// as itemBytes(stored).
  int64_t scale(int64_t bytes) const {
    return kind == Kind::plain
               ? bytes
               : bytes / static_cast<int64_t>(itemBytes(sent)) * static_cast<int64_t>(itemBytes(stored));
  }
};

/// Returns the storage form of a cast from one format to another.
inline StorageForm castForm(NumberFormat from, NumberFormat to, OverflowRule overflow = OverflowRule::error) {
  return {StorageForm::Kind::cast, from, to, itemBytes(from), overflow};
}

/// What a cast writes for values beyond the range of its target.
constexpr Overflow written(OverflowRule rule) {
  return rule == OverflowRule::saturate ? Overflow::saturate : Overflow::infinity;
}

/// The matrices of a param of form `elements` or `codes`. An element's address, relative to `begin`, only encodes its
/// index; it is not dereferenced.
struct ViewBase {
  Quantized matrices;
  const std::byte *begin = nullptr;
};

/// The storage forms of both sides of a copy.
struct Conversion {
  StorageForm read, write;
  const ViewBase *from = nullptr, *to = nullptr;

  explicit operator bool() const { return read || write; }
  bool operator==(const Conversion &) const = default;
};

/// Converts adjacent elements, `bytes` of them as sent. A null `source` means zeros; it requires a quantized target
/// whose blocks have one row. Other quantized targets are written in whole rows of blocks. Casts round to nearest, ties
/// to even; OverflowRule says what becomes of values beyond the range.
void convertRow(std::byte *target, const std::byte *source, uint64_t bytes, const Conversion &conversion,
                bool stream = false);

/// As copyRows. rowBytes counts bytes as sent; strides are those of each side's memory.
void convertRows(const StridedRows &rows, const Conversion &conversion, bool stream = false);

} // namespace reshard::kernels
