// SPDX-License-Identifier: Apache-2.0
// Layouts of the scales of quantized matrices. This file has the only definition of each.
// - plain: row-major, one scale for each block. The other layouts store scales of one byte.
// - swizzled: as Blackwell's tensor cores read them (cuBLAS: "1-D blocked"): tiles of 128 rows by 4 columns, 512 bytes
//   each, row-major among themselves; rows and columns are padded to whole tiles. In a tile, rows r, r + 32, r + 64 and
//   r + 96 are adjacent: 16 bytes, four for each row.
// - packed: as DeepGEMM's kernels for Blackwell read them: an int32 for each row of elements and four columns of
//   scales, the first column in the low byte. All rows of a block repeat its scale. The int32 of all rows are adjacent;
//   their number is rounded up to a multiple of four (16 bytes, the alignment of TMA). The added rows are part of the
//   last block, if it has as many; else they are zero. Groups of four columns follow each other.
#pragma once

#include "base/formats/quantized_formats.h"
#include "kernels/host_device.h"

#include <cstddef>

namespace reshard::kernels {

using reshard::ScaleLayout; // found before the enumeration of plans in files that use namespace schema

/// Rows and columns of the scales of a matrix (for MXFP8, ceil(elements of a row / 32) columns), the rows of elements
/// of a block, and the rows of the matrix.
struct ScaleShape {
  uint64_t rows = 0, columns = 0, blockRows = 1, matrixRows = rows;
};

constexpr uint64_t kScaleTileRows = 128, kScaleTileColumns = 4, kScaleTileBytes = kScaleTileRows * kScaleTileColumns;
/// Bytes of an int32 of the packed layout, and the multiple of rows to which it is padded.
constexpr uint64_t kPackedScales = 4, kPackedRows = 4;

/// Returns the rows of the packed layout, padding included.
RESHARD_HOST_DEVICE inline uint64_t packedRows(const ScaleShape &shape) {
  return (shape.matrixRows + kPackedRows - 1) / kPackedRows * kPackedRows;
}

/// Returns the number of scales of a layout, padding and repetitions included: bytes, if it is not plain.
RESHARD_HOST_DEVICE inline uint64_t storedScales(ScaleLayout layout, const ScaleShape &shape) {
  switch (layout) {
  case ScaleLayout::swizzled:
    return (shape.rows + kScaleTileRows - 1) / kScaleTileRows *
           ((shape.columns + kScaleTileColumns - 1) / kScaleTileColumns) * kScaleTileBytes;
  case ScaleLayout::packed:
    return (shape.columns + kPackedScales - 1) / kPackedScales * packedRows(shape) * kPackedScales;
  default:
    return shape.rows * shape.columns;
  }
}

/// Returns the index of the scale of (row, column) in a layout; of several equal ones, that of the first.
RESHARD_HOST_DEVICE inline uint64_t scaleOffset(ScaleLayout layout, const ScaleShape &shape, uint64_t row,
                                                uint64_t column) {
  switch (layout) {
  case ScaleLayout::swizzled: {
    const uint64_t tile = row / kScaleTileRows * ((shape.columns + kScaleTileColumns - 1) / kScaleTileColumns) +
                          column / kScaleTileColumns;
    return tile * kScaleTileBytes + row % 32 * 16 + row % kScaleTileRows / 32 * kScaleTileColumns +
           column % kScaleTileColumns;
  }
  case ScaleLayout::packed:
    return (column / kPackedScales * packedRows(shape) + row * shape.blockRows) * kPackedScales +
           column % kPackedScales;
  default:
    return row * shape.columns + column;
  }
}

/// Returns how often a layout has the scale of a row of blocks, kPackedScales bytes from one to the next.
RESHARD_HOST_DEVICE inline uint64_t scaleCopies(ScaleLayout layout, const ScaleShape &shape, uint64_t row) {
  const uint64_t rest = packedRows(shape) - row * shape.blockRows;
  return layout != ScaleLayout::packed ? 1 : rest < shape.blockRows ? rest : shape.blockRows;
}

/// The inverse of scaleOffset: the row and the column of the scale with an index. Those of padding are beyond the
/// shape.
struct ScalePosition {
  uint64_t row, column;
};
RESHARD_HOST_DEVICE inline ScalePosition scalePosition(ScaleLayout layout, const ScaleShape &shape, uint64_t offset) {
  switch (layout) {
  case ScaleLayout::swizzled: {
    const uint64_t tiles = (shape.columns + kScaleTileColumns - 1) / kScaleTileColumns, tile = offset / kScaleTileBytes,
                   down = quotient(tile, tiles);
    return {down * kScaleTileRows + offset % 16 / kScaleTileColumns * 32 + offset % kScaleTileBytes / 16,
            (tile - down * tiles) * kScaleTileColumns + offset % kScaleTileColumns};
  }
  case ScaleLayout::packed: {
    const uint64_t rows = packedRows(shape), word = offset / kPackedScales, group = quotient(word, rows),
                   row = word - group * rows;
    return {quotient(row, shape.blockRows), group * kPackedScales + offset % kPackedScales};
  }
  default: {
    const uint64_t row = quotient(offset, shape.columns);
    return {row, offset - row * shape.columns};
  }
  }
}

/// The scales of one matrix, of one byte each, in a layout.
struct ScaleMatrix {
  std::byte *scales;
  ScaleLayout layout;
  ScaleShape shape;
};

/// A rectangle of a matrix of scales: rows [row, row + rows), columns [column, column + columns).
struct ScaleSlice {
  uint64_t row, column, rows, columns;
};

/// Copies a slice between plain scales (`plain` is the address of the slice's first scale, `stride` the bytes from row
/// to row) and a matrix of scales in any layout. Does not touch padding.
void writeScales(const ScaleMatrix &target, const ScaleSlice &slice, const std::byte *plain, int64_t stride);
void readScales(std::byte *plain, int64_t stride, const ScaleMatrix &source, const ScaleSlice &slice);

/// Writes zeros to the padding.
void clearScalePadding(const ScaleMatrix &target);

} // namespace reshard::kernels
