// Quantized matrices in memory (convert.h defines the formats), and conversions of ranges of their elements, for params
// that are stored quantized and are read or written in parts. These functions never allocate and never fail.
#pragma once

#include "formats/quantized_formats.h"
#include "kernels/convert.h"

namespace reshard::kernels {

using reshard::Quantization;

/// Rows and columns of a block.
struct BlockShape {
  uint64_t rows, columns;
};
constexpr BlockShape blockShape(Quantization format) {
  return {static_cast<uint64_t>(formatOf(format).blockRows), static_cast<uint64_t>(formatOf(format).blockColumns)};
}

/// Matrices of rows x columns, one after the other, each in the format of convert.h and scales.h. For mxfp8 and nvfp4
/// the columns are a multiple of the block. Elements are numbered across all matrices, row by row.
struct Quantized {
  Quantization format = Quantization::mxfp8;
  Format wide = Format::bf16; ///< format of the elements: fp32, bf16 or fp16
  bool swizzled = false;      ///< layout of the scales
  uint64_t matrices = 1, rows = 0, columns = 0;
  std::byte *codes = nullptr;
  std::byte *scales = nullptr;       ///< E8M0, fp32 or E4M3
  std::byte *tensorScales = nullptr; ///< nvfp4: fp32, one for each matrix

  uint64_t elements() const { return matrices * rows * columns; }
  /// Bytes of all codes, and bytes of the scales of one matrix.
  uint64_t codeBytes() const { return format == Quantization::nvfp4 ? elements() / 2 : elements(); }
  uint64_t scaleBytes() const;
  /// Rows of blocks of all matrices; they can be converted independently.
  uint64_t blockRows() const;
};

/// Quantizes rows of blocks [first, first + count); `wide` is the address of element 0, even if the rows begin later.
/// quantizeRows writes codes and scales, scaleRows only scales. For nvfp4 the tensor scales must be set. The padding of
/// swizzled scales is not written.
void quantizeRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
                  ConvertOptions how = {});
void scaleRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count, ConvertOptions how = {});

/// mxfp8, nvfp4: quantizes elements [first, first + count), whole blocks, from contiguous elements at `wide`; null
/// means zeros.
void quantizeBlocks(const Quantized &target, uint64_t first, const std::byte *wide, uint64_t count,
                    ConvertOptions how = {});

/// mxfp8, block_fp8: writes the codes of elements [first, first + count) with the scales of `with`. Any range; `wide`
/// and `codes` are the addresses of its first element.
void encodeElements(const Quantized &with, uint64_t first, std::byte *codes, const std::byte *wide, uint64_t count,
                    ConvertOptions how = {});

/// Dequantizes elements [first, first + count), any range, to `wide`.
void decodeElements(const Quantized &source, uint64_t first, std::byte *wide, uint64_t count, ConvertOptions how = {});

/// Copies the swizzled scales of all matrices to the plain layout, matrix after matrix; and back (padding becomes
/// zero).
void unswizzle(const Quantized &source, std::byte *plain);
void swizzle(const Quantized &target, const std::byte *plain);

} // namespace reshard::kernels
