// SPDX-License-Identifier: Apache-2.0
#include "kernels/scales.h"

#include <algorithm>
#include <cstring>

namespace reshard::kernels {

namespace {

/// In layouts that are not plain, up to four scales of a row are contiguous, beginning at a multiple of four columns.
constexpr uint64_t kTogether = 4;
static_assert(kScaleTileColumns == kTogether && kPackedScales == kTogether);

/// Calls visit(index in the layout, row, column, columns) for each range of a slice's scales that is contiguous.
template <class Visit> void forRanges(const ScaleMatrix &of, const ScaleSlice &slice, Visit visit) {
  for (uint64_t row = slice.row; row < slice.row + slice.rows; ++row)
    for (uint64_t column = slice.column, end = slice.column + slice.columns; column < end;) {
      const uint64_t columns = std::min(kTogether - column % kTogether, end - column);
      visit(scaleOffset(of.layout, of.shape, row, column), row, column, columns);
      column += columns;
    }
}

int64_t plainOffset(const ScaleSlice &slice, int64_t stride, uint64_t row, uint64_t column) {
  return static_cast<int64_t>(row - slice.row) * stride + static_cast<int64_t>(column - slice.column);
}

/// Copies a range. Most ranges have four scales: one load and one store.
void copyRange(std::byte *target, const std::byte *source, uint64_t columns) {
  if (columns == kTogether)
    std::memcpy(target, source, kTogether);
  else
    std::memcpy(target, source, columns);
}

} // namespace

void writeScales(const ScaleMatrix &target, const ScaleSlice &slice, const std::byte *plain, int64_t stride) {
  forRanges(target, slice, [&](uint64_t offset, uint64_t row, uint64_t column, uint64_t columns) {
    const std::byte *const from = plain + plainOffset(slice, stride, row, column);
    const uint64_t copies = scaleCopies(target.layout, target.shape, row);
    for (uint64_t copy = 0; copy < copies; ++copy)
      copyRange(target.scales + offset + copy * kPackedScales, from, columns);
  });
}

void readScales(std::byte *plain, int64_t stride, const ScaleMatrix &source, const ScaleSlice &slice) {
  forRanges(source, slice, [&](uint64_t offset, uint64_t row, uint64_t column, uint64_t columns) {
    copyRange(plain + plainOffset(slice, stride, row, column), source.scales + offset, columns);
  });
}

void clearScalePadding(const ScaleMatrix &target) {
  const ScaleShape &shape = target.shape;
  const uint64_t columns = (shape.columns + kTogether - 1) / kTogether * kTogether;
  if (target.layout == ScaleLayout::swizzled) {
    const uint64_t rows = (shape.rows + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
    auto clear = [&](const ScaleSlice &slice) {
      forRanges(target, slice, [&](uint64_t offset, uint64_t, uint64_t, uint64_t count) {
        std::memset(target.scales + offset, 0, count);
      });
    };
    clear({0, shape.columns, shape.rows, columns - shape.columns});
    clear({shape.rows, 0, rows - shape.rows, columns});
  } else if (target.layout == ScaleLayout::packed) {
    const uint64_t rows = packedRows(shape), used = shape.columns % kPackedScales,
                   inBlocks = std::min(rows, shape.rows * shape.blockRows);
    for (uint64_t group = 0; group < columns / kPackedScales; ++group)
      std::memset(target.scales + (group * rows + inBlocks) * kPackedScales, 0, (rows - inBlocks) * kPackedScales);
    std::byte *const last = target.scales + (columns / kPackedScales - 1) * rows * kPackedScales;
    for (uint64_t row = 0; used > 0 && row < rows; ++row)
      std::memset(last + row * kPackedScales + used, 0, kPackedScales - used);
  }
}

} // namespace reshard::kernels
