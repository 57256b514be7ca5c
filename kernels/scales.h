// Layouts of the scales of quantised matrices: bytes, one for each row and column of blocks. A plain one is row-major;
// in the swizzled one, which the matrix units of Blackwell read (cuBLAS' "1-D blocked" layout), tiles of 128 rows by 4
// columns are 512 bytes each, row-major among themselves, and rows and columns are padded to whole tiles. In a tile,
// rows r, r + 32, r + 64 and r + 96 stand together: 16 bytes, four for each row.
#pragma once

#include "kernels/host_device.h"

#include <cstddef>

namespace reshard::kernels {

/// Rows and columns of scales: of MXFP8 ceil(elements of a row / 32) columns.
struct ScaleShape {
  uint64_t rows, columns;
};

constexpr uint64_t kScaleTileRows = 128, kScaleTileColumns = 4, kScaleTileBytes = kScaleTileRows * kScaleTileColumns;

/// Bytes of the swizzled layout, padding included.
uint64_t swizzledBytes(ScaleShape shape);

/// Where the scale of (row, column) lies in it.
RESHARD_HOST_DEVICE inline uint64_t swizzledOffset(ScaleShape shape, uint64_t row, uint64_t column) {
  const uint64_t tile =
      row / kScaleTileRows * ((shape.columns + kScaleTileColumns - 1) / kScaleTileColumns) + column / kScaleTileColumns;
  return tile * kScaleTileBytes + row % 32 * 16 + row % kScaleTileRows / 32 * kScaleTileColumns +
         column % kScaleTileColumns;
}

/// A part of a matrix of scales: rows [row, row + rows), columns [column, column + columns). Any part will do.
struct ScaleSlice {
  uint64_t row, column, rows, columns;
};

/// A slice between a plain layout, of which `plain` is the slice's first scale and `stride` the bytes from row to row,
/// and the swizzled layout of the whole matrix. Padding is not touched.
void swizzleScales(std::byte *swizzled, ScaleShape shape, const ScaleSlice &slice, const std::byte *plain,
                   int64_t stride);
void unswizzleScales(std::byte *plain, int64_t stride, const std::byte *swizzled, ScaleShape shape,
                     const ScaleSlice &slice);

/// Zeros to the padding.
void clearScalePadding(std::byte *swizzled, ScaleShape shape);

} // namespace reshard::kernels
