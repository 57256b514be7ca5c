// Copies of strided bytes whose elements change on their way: what goes is of one format, what stands in memory of
// another.
#pragma once

#include "kernels/quantized.h"
#include "kernels/strided.h"

namespace reshard::kernels {

/// How memory differs from the bytes that go into it or out of it.
struct StorageForm {
  /// cast: elements of another format, only written. elements: of matrices that stand quantised. codes: of matrices
  /// that do not, only read.
  enum class Kind : uint8_t { plain, cast, elements, codes };
  Kind kind = Kind::plain;
  Format sent = Format::fp32, stored = Format::fp32;
  uint64_t block = 1; ///< bytes that go and are written at once

  explicit operator bool() const { return kind != Kind::plain; }
  bool operator==(const StorageForm &) const = default;
  uint64_t item() const { return kind == Kind::plain ? 1 : itemBytes(sent); }
  /// Bytes in memory, by bytes that go; of whole elements. Those of matrices that stand quantised count as one each.
  int64_t scale(int64_t bytes) const {
    return kind == Kind::plain
               ? bytes
               : bytes / static_cast<int64_t>(itemBytes(sent)) * static_cast<int64_t>(itemBytes(stored));
  }
};

/// The form of a cast from one format to another.
inline StorageForm castForm(Format from, Format to) { return {StorageForm::Kind::cast, from, to, itemBytes(from)}; }

/// Matrices behind memory of form `elements` or `codes`: an element's address, `begin` for the first, is only its
/// number.
struct ViewBase {
  Quantized matrices;
  const std::byte *begin = nullptr;
};

/// Both sides of a copy.
struct Conversion {
  StorageForm read, write;
  const ViewBase *from = nullptr, *to = nullptr;

  explicit operator bool() const { return read || write; }
  bool operator==(const Conversion &) const = default;
};

/// Elements side by side, `bytes` of them as they go; `source` null: zeros, for matrices that stand quantised, whose
/// blocks have one row. Matrices with others are written by whole rows of blocks. Casts round to nearest, ties to even;
/// what an 8-bit format cannot hold saturates.
void convertRow(std::byte *target, const std::byte *source, uint64_t bytes, const Conversion &conversion,
                bool stream = false);

/// As copyRows; rowBytes are of what goes, strides of the memory of each side.
void convertRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count,
                 const Conversion &conversion, bool stream = false);

} // namespace reshard::kernels
