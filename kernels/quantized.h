// Quantised matrices in memory (convert.h has the formats), and ranges of their elements: what a param that stands
// quantised is to those who read or write it in parts. Nothing here allocates or fails.
#pragma once

#include "kernels/convert.h"

namespace reshard::kernels {

enum class Quantization : uint8_t { mxfp8, block_fp8, nvfp4 };

/// Rows and columns of a block.
struct BlockShape {
  uint64_t rows, columns;
};
constexpr BlockShape blockShape(Quantization format) {
  return format == Quantization::block_fp8 ? BlockShape{kFp8Block, kFp8Block}
                                           : BlockShape{1, format == Quantization::mxfp8 ? kMxBlock : kNvfp4Block};
}

/// Matrices of rows x columns, one behind the other, each as convert.h and scales.h have it. Of mxfp8 and nvfp4 the
/// columns are whole blocks. Elements are numbered over all matrices, row by row.
struct Quantized {
  Quantization format = Quantization::mxfp8;
  Format wide = Format::bf16; ///< of elements: fp32, bf16 or fp16
  bool swizzled = false;      ///< the scales
  uint64_t matrices = 1, rows = 0, columns = 0;
  std::byte *codes = nullptr;
  std::byte *scales = nullptr;       ///< E8M0, fp32, E4M3
  std::byte *tensorScales = nullptr; ///< nvfp4: fp32, one for each matrix

  uint64_t elements() const { return matrices * rows * columns; }
  /// Bytes of all codes; of the scales of one matrix.
  uint64_t codeBytes() const { return format == Quantization::nvfp4 ? elements() / 2 : elements(); }
  uint64_t scaleBytes() const;
  /// Rows of blocks of all matrices: what can be worked on apart.
  uint64_t blockRows() const;
};

/// Rows of blocks [first, first + count) from their elements; `wide` is where element 0 stands, or would. Codes and
/// scales, or scales alone. Of nvfp4 the tensor scales must be there. Padding of swizzled scales is left alone.
void quantizeRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
                  ConvertOptions how = {});
void scaleRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count, ConvertOptions how = {});

/// mxfp8, nvfp4: elements [first, first + count), whole blocks, from `wide`, where they stand side by side; null:
/// zeros.
void quantizeBlocks(const Quantized &target, uint64_t first, const std::byte *wide, uint64_t count,
                    ConvertOptions how = {});

/// mxfp8, block_fp8: codes of elements [first, first + count) with the scales that are there. Any range; `wide` and
/// `codes` are where its own begin.
void encodeElements(const Quantized &with, uint64_t first, std::byte *codes, const std::byte *wide, uint64_t count,
                    ConvertOptions how = {});

/// Elements [first, first + count), any range, dequantised to where `wide` begins.
void decodeElements(const Quantized &source, uint64_t first, std::byte *wide, uint64_t count, ConvertOptions how = {});

/// The swizzled scales of all matrices to plain ones, which stand matrix by matrix, and back (padding becomes zeros).
void unswizzle(const Quantized &source, std::byte *plain);
void swizzle(const Quantized &target, const std::byte *plain);

} // namespace reshard::kernels
