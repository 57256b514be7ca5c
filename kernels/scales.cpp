#include "kernels/scales.h"

#include <algorithm>
#include <cstring>

namespace reshard::kernels {

namespace {

uint64_t tiles(uint64_t count, uint64_t each) { return (count + each - 1) / each; }

/// Calls visit(offset in the swizzled layout, row, column, columns) for each run of a slice's scales that is contiguous
/// in the swizzled layout: up to four scales of a row.
template <class Visit> void forRuns(ScaleShape shape, const ScaleSlice &slice, Visit visit) {
  for (uint64_t row = slice.row; row < slice.row + slice.rows; ++row)
    for (uint64_t column = slice.column, end = slice.column + slice.columns; column < end;) {
      const uint64_t columns = std::min(kScaleTileColumns - column % kScaleTileColumns, end - column);
      visit(swizzledOffset(shape, row, column), row, column, columns);
      column += columns;
    }
}

int64_t plainOffset(const ScaleSlice &slice, int64_t stride, uint64_t row, uint64_t column) {
  return static_cast<int64_t>(row - slice.row) * stride + static_cast<int64_t>(column - slice.column);
}

/// Copies a run. Most runs have four scales: one load and one store.
void copyRun(std::byte *target, const std::byte *source, uint64_t columns) {
  if (columns == kScaleTileColumns)
    std::memcpy(target, source, kScaleTileColumns);
  else
    std::memcpy(target, source, columns);
}

} // namespace

uint64_t swizzledBytes(ScaleShape shape) {
  return tiles(shape.rows, kScaleTileRows) * tiles(shape.columns, kScaleTileColumns) * kScaleTileBytes;
}

void swizzleScales(std::byte *swizzled, ScaleShape shape, const ScaleSlice &slice, const std::byte *plain,
                   int64_t stride) {
  forRuns(shape, slice, [&](uint64_t offset, uint64_t row, uint64_t column, uint64_t columns) {
    copyRun(swizzled + offset, plain + plainOffset(slice, stride, row, column), columns);
  });
}

void unswizzleScales(std::byte *plain, int64_t stride, const std::byte *swizzled, ScaleShape shape,
                     const ScaleSlice &slice) {
  forRuns(shape, slice, [&](uint64_t offset, uint64_t row, uint64_t column, uint64_t columns) {
    copyRun(plain + plainOffset(slice, stride, row, column), swizzled + offset, columns);
  });
}

void clearScalePadding(std::byte *swizzled, ScaleShape shape) {
  const uint64_t rows = tiles(shape.rows, kScaleTileRows) * kScaleTileRows,
                 columns = tiles(shape.columns, kScaleTileColumns) * kScaleTileColumns;
  auto clear = [&](const ScaleSlice &slice) {
    forRuns(shape, slice,
            [&](uint64_t offset, uint64_t, uint64_t, uint64_t count) { std::memset(swizzled + offset, 0, count); });
  };
  clear({0, shape.columns, shape.rows, columns - shape.columns});
  clear({shape.rows, 0, rows - shape.rows, columns});
}

} // namespace reshard::kernels
