// Layouts of the scales of quantized matrices: one byte for each row and column of blocks. The plain layout is
// row-major. The swizzled layout is the one that Blackwell's tensor cores read (cuBLAS: "1-D blocked"): tiles of 128
// rows by 4 columns, 512 bytes each, row-major among themselves; rows and columns are padded to whole tiles. In a tile,
// rows r, r + 32, r + 64 and r + 96 are adjacent: 16 bytes, four for each row.
#pragma once

#include "kernels/host_device.h"

#include <cstddef>

namespace reshard::kernels {

/// Rows and columns of the scales of a matrix; for MXFP8, ceil(elements of a row / 32) columns.
struct ScaleShape {
  uint64_t rows, columns;
};

constexpr uint64_t kScaleTileRows = 128, kScaleTileColumns = 4, kScaleTileBytes = kScaleTileRows * kScaleTileColumns;

/// Bytes of the swizzled layout, padding included.
uint64_t swizzledBytes(ScaleShape shape);

/// Returns the offset of the scale of (row, column) in the swizzled layout.
RESHARD_HOST_DEVICE inline uint64_t swizzledOffset(ScaleShape shape, uint64_t row, uint64_t column) {
  const uint64_t tile =
      row / kScaleTileRows * ((shape.columns + kScaleTileColumns - 1) / kScaleTileColumns) + column / kScaleTileColumns;
  return tile * kScaleTileBytes + row % 32 * 16 + row % kScaleTileRows / 32 * kScaleTileColumns +
         column % kScaleTileColumns;
}

/// A rectangle of a matrix of scales: rows [row, row + rows), columns [column, column + columns).
struct ScaleSlice {
  uint64_t row, column, rows, columns;
};

/// Copies a slice between a plain layout (`plain` is the address of the slice's first scale, `stride` the bytes from
/// row to row) and the swizzled layout of the whole matrix. Does not touch padding.
void swizzleScales(std::byte *swizzled, ScaleShape shape, const ScaleSlice &slice, const std::byte *plain,
                   int64_t stride);
void unswizzleScales(std::byte *plain, int64_t stride, const std::byte *swizzled, ScaleShape shape,
                     const ScaleSlice &slice);

/// Writes zeros to the padding.

void clearScalePadding(std::byte *swizzled, ScaleShape shape);

} // namespace reshard::kernels
