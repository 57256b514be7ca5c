// SPDX-License-Identifier: Apache-2.0
// Casts and quantization of elements on the CPU. These functions never allocate and never fail; values that a format
// cannot represent are handled as described here.
//
// Elements are rounded to the nearest value, ties to the even code; arithmetic is fp32. Source and target must not
// overlap and need no alignment. `stream` is that of copyRows.
#pragma once

#include "kernels/cpu/streaming_stores.h"
#include "kernels/number_formats.h"

namespace reshard::kernels {

/// Options of a conversion. `level` must not be above cpuLevel(); all levels give the same bytes.
struct ConvertOptions {
  bool stream = false;
  CpuLevel level = cpuLevel();
  bool finish = true; ///< false: the caller calls finishStreaming() once, after many short conversions, because each
                      ///< call waits for the streamed lines
};

/// A cast of `count` elements; both formats have 8 bits or more. For equal formats use copyRows, which keeps NaNs as
/// they are.
struct Cast {
  NumberFormat to;
  std::byte *target;
  NumberFormat from;
  const std::byte *source;
  uint64_t count;
  Overflow overflow;
};
void cast(const Cast &cast, const ConvertOptions &how = {});

/// Whether a cast between these formats may find values beyond the range of `to`; and whether elements have one.
bool mayOverflow(NumberFormat from, NumberFormat to);
bool anyBeyond(NumberFormat to, NumberFormat from, const std::byte *source, uint64_t count,
               const ConvertOptions &how = {});

/// A matrix on both sides; strides between rows in bytes.
struct Matrix {
  uint64_t rows, columns;
  int64_t targetStride, sourceStride;
};

/// Returns the amax of a matrix (targetStride is ignored): 0 if it has no elements, NaN if it contains a NaN or an
/// infinity.
float amax(NumberFormat wide, const std::byte *source, const Matrix &matrix, const ConvertOptions &how = {});

/// Codes and scales of a matrix of `rows` x `columns` elements. Blocks are counted from the first element; the last
/// ones may be short. Scales are in the plain layout, without gaps: ceil(columns / columns of a block) of them for each
/// row of blocks. Two 4-bit codes are stored in a byte, the first in the low bits; an odd last one of a row is padded
/// with 0.
struct BlockMatrix {
  Quantization format;
  NumberFormat wide; ///< the format of the elements: fp32, bf16 or fp16
  uint64_t rows, columns;
  int64_t wideStride, codeStride; ///< bytes from row to row of elements, and of codes; one row does not use them
  std::byte *codes, *scales;
  float tensorScale = 1; ///< formats with tensor scales only
};

/// Quantizes a matrix of elements at `wide`. The scales follow from the amax of their blocks, by the rule of the format
/// (base/formats/quantized_formats.h):
/// - powerOfTwo: the least power of two with which nothing saturates, 2^ceil(log2(amax / largest code value)), as in
///   Megatron-Core, FlashInfer and Transformer Engine (the text of OCP Microscaling gives the example
///   2^(floor(log2(amax)) - 8), which saturates). A block of zeros has the scale 2^-127, code 0.
/// - quotient: amax / largest code value, or 1 if that is 0; DeepSeek stores it as `weight_scale_inv`. For int4 codes
///   amax / 7.5, rounded to bf16, as compressed-tensors does.
/// - tensorQuotient: amax / (largest code value * tensorScale), rounded and saturating, 1 if that is 0, as ModelOpt
///   writes it. Elements are 0 if the scale was rounded to 0.
/// A code is element / scale, or element / (scale * tensorScale), saturating. The scale of a block that contains a NaN
/// or an infinity is NaN, so the whole block becomes NaN: a weight that is not finite never becomes finite. Its E4M3
/// codes are NaN, its codes of four bits the largest value, with the signs of the elements.
void quantize(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how = {});

/// Writes only the scales.
void computeScales(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how = {});

/// Writes only the codes, with given scales: what quantize gives with these scales. A value beyond the largest code
/// becomes NaN if blocks have one row, else it saturates. Not for two codes in a byte.
void quantizeWithScales(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how = {});

/// Writes the elements: code * scale, or code * (scale * tensorScale).
void dequantize(const BlockMatrix &source, std::byte *wide, const ConvertOptions &how = {});

/// Returns the scale of a whole NVFP4 tensor with this amax: amax / (448 * 6), or 1 if that is 0 (`weight_scale_2` of
/// ModelOpt).
float nvfp4TensorScale(float amax);

} // namespace reshard::kernels
