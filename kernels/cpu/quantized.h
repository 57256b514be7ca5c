// SPDX-License-Identifier: Apache-2.0
// Quantized matrices in memory, and conversions of ranges of their elements, for params that are stored quantized and
// are read or written in parts (convert.h defines the results). These functions never allocate and never fail.
#pragma once

#include "base/formats/quantized_formats.h"
#include "kernels/cpu/convert.h"
#include "kernels/scales.h"

#include <bit>

namespace reshard::kernels {

using reshard::Quantization;

/// Elements of a block of MXFP8.
constexpr uint64_t kMxBlock = static_cast<uint64_t>(formatOf(Quantization::mxfp8).blockColumns);

/// Rows and columns of a block.
struct BlockShape {
  uint64_t rows, columns;
};
constexpr BlockShape blockShape(Quantization format) {
  return {static_cast<uint64_t>(formatOf(format).blockRows), static_cast<uint64_t>(formatOf(format).blockColumns)};
}

/// Division by rows or columns of a block, which are powers of two. Real divisions would be much of the time of short
/// ranges.
constexpr uint64_t divide(uint64_t count, uint64_t power) { return count >> std::countr_zero(power); }
constexpr uint64_t divideUp(uint64_t count, uint64_t power) { return divide(count + power - 1, power); }

/// Matrices of rows x columns, one after the other, each with scales in a layout of scales.h. For formats whose blocks
/// have one row, the columns are a multiple of the block. Elements are numbered across all matrices, row by row.
struct Quantized {
  Quantization format = Quantization::mxfp8;
  NumberFormat wide = NumberFormat::bf16; ///< format of the elements: fp32, bf16 or fp16
  ScaleLayout layout = ScaleLayout::plain;
  uint64_t matrices = 1, rows = 0, columns = 0;
  std::byte *codes = nullptr;
  std::byte *scales = nullptr;       ///< in the format's scale format
  std::byte *tensorScales = nullptr; ///< formats with tensor scales only: fp32, one for each matrix

  uint64_t elements() const { return matrices * rows * columns; }
  /// Bytes of all codes, and bytes of the scales of one matrix.
  uint64_t codeBytes() const { return elements() / static_cast<uint64_t>(formatOf(format).codesPerByte()); }
  uint64_t scaleBytes() const;
  /// The scales of one matrix.
  ScaleShape scaleShape() const {
    const BlockShape block = blockShape(format);
    return {divideUp(rows, block.rows), divideUp(columns, block.columns), block.rows, rows};
  }
  /// Rows of blocks of all matrices; they can be converted independently.
  uint64_t blockRows() const { return matrices * scaleShape().rows; }
};

/// Quantizes rows of blocks [first, first + count); `wide` is the address of element 0, even if the rows begin later.
/// quantizeRows writes codes and scales, scaleRows only scales. Tensor scales must be set. Padding of scales is not
/// written.
void quantizeRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
                  const ConvertOptions &how = {});
void scaleRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
               const ConvertOptions &how = {});

/// Elements [first, first + count).
struct ElementSpan {
  uint64_t first, count;
};

/// For formats whose blocks have one row: quantizes a range of whole blocks from contiguous elements; null means zeros.
/// `wide`, here and below, is the address of the first element of the range.
void quantizeBlocks(const Quantized &target, ElementSpan span, const std::byte *wide, const ConvertOptions &how = {});

/// For formats of one code in a byte: writes the codes of a range of elements, from `codes` on, with the scales of
/// `with`. Any range.
void encodeElements(const Quantized &with, ElementSpan span, std::byte *codes, const std::byte *wide,
                    const ConvertOptions &how = {});

/// Dequantizes a range of elements. Any range.
void decodeElements(const Quantized &source, ElementSpan span, std::byte *wide, const ConvertOptions &how = {});

/// Copies the scales of all matrices to the plain layout, matrix after matrix; and back (padding becomes zero).
void toPlainScales(const Quantized &source, std::byte *plain);
void fromPlainScales(const Quantized &target, const std::byte *plain);

/// Writes zeros to the padding of the scales of all matrices.
void clearScalePadding(const Quantized &target);

} // namespace reshard::kernels
