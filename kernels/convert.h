// Casts and quantization of contiguous elements on the CPU. These functions never allocate and never fail; values that
// a format cannot represent are handled as described here.
//
// Elements are rounded to the nearest value, ties to the even code; arithmetic is fp32. Source and target must not
// overlap and need no alignment. Quantized formats store a scale for each block; dequantization multiplies by it. The
// scale of a block that contains a NaN or an infinity is NaN, so the whole block becomes NaN: a weight that is not
// finite never becomes finite. Quantization reads fp32, bf16 or fp16, and dequantization writes them (`wide` below). A
// shorter last block has a scale of its own elements. `stream` is that of copyRows.
#pragma once

#include "kernels/formats.h"
#include "kernels/stream.h"

namespace reshard::kernels {

/// Elements of a block of MXFP8 and of NVFP4; rows and columns of a block of block FP8.
constexpr uint64_t kMxBlock = 32, kNvfp4Block = 16, kFp8Block = 128;

/// Options of a conversion. `level` must not be above cpuLevel(); all levels give the same bytes.
struct ConvertOptions {
  bool stream = false;
  Level level = cpuLevel();
  bool finish = true; ///< false: the caller calls finishStreaming() once, after many short conversions, because each
                      ///< call waits for the streamed lines
};

/// Converts `count` elements to another format; both formats have 8 bits or more. For equal formats use copyRows, which
/// keeps NaNs as they are.
void cast(Format to, std::byte *target, Format from, const std::byte *source, uint64_t count, Overflow overflow,
          ConvertOptions how = {});

/// MXFP8 (OCP Microscaling 1.0): E4M3 elements and ceil(count / 32) scales in E8M0. The scale is the smallest power of
/// two with which nothing saturates, 2^ceil(log2(amax / 448)), as in Megatron-Core, FlashInfer and Transformer Engine
/// (OCP's text gives the example 2^(floor(log2(amax)) - 8), which saturates). A block of zeros has the scale 2^-127,
/// code 0.
void quantizeMxfp8(std::byte *target, std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                   ConvertOptions how = {});
void dequantizeMxfp8(Format wide, std::byte *target, const std::byte *source, const std::byte *scales, uint64_t count,
                     ConvertOptions how = {});

/// Only the scales, and only the elements with given scales. encodeMxfp8 gives what quantizeMxfp8 gives with these
/// scales, and NaN where a scale is too small.
void scaleMxfp8(std::byte *scales, Format wide, const std::byte *source, uint64_t count, ConvertOptions how = {});
void encodeMxfp8(std::byte *target, const std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                 ConvertOptions how = {});

/// A matrix on both sides; strides between rows in bytes.
struct Matrix {
  uint64_t rows, columns;
  int64_t targetStride, sourceStride;
};

/// Returns the amax of a matrix (targetStride is ignored): 0 if it has no elements, NaN if it contains a NaN or an
/// infinity.
float amax(Format wide, const std::byte *source, const Matrix &matrix, ConvertOptions how = {});

/// Returns the scale of a block of FP8 with this amax: amax / 448, or 1 if that is 0. DeepSeek stores it as
/// `weight_scale_inv`.
float fp8Scale(float amax);

/// Quantizes a matrix with one scale to E4M3, x / scale, saturating; and back, x * scale. For blocks whose scale is
/// known already, such as blocks that are split between ranks.
void quantizeFp8(std::byte *target, float scale, Format wide, const std::byte *source, const Matrix &matrix,
                 ConvertOptions how = {});
void dequantizeFp8(Format wide, std::byte *target, const std::byte *source, float scale, const Matrix &matrix,
                   ConvertOptions how = {});

/// Block FP8 as in DeepSeek's checkpoints: blocks of 128 x 128, counted from the matrix's first element, with their
/// fp8Scale. `scales` is row-major: a row of ceil(columns / 128) scales for each 128 rows.
void quantizeBlockFp8(std::byte *target, float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                      ConvertOptions how = {});
/// Only the elements, with given scales.
void encodeBlockFp8(std::byte *target, const float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                    ConvertOptions how = {});
void dequantizeBlockFp8(Format wide, std::byte *target, const std::byte *source, const float *scales,
                        const Matrix &matrix, ConvertOptions how = {});

/// Returns the scale of a whole NVFP4 tensor with this amax: amax / (448 * 6), or 1 if that is 0 (`weight_scale_2` of
/// ModelOpt).
float nvfp4TensorScale(float amax);

/// NVFP4 as ModelOpt writes it: E2M1 elements, two in a byte, the first in the low bits (an odd last one is padded with
/// 0), and ceil(count / 16) scales in E4M3: amax / (6 * tensorScale), saturating, 1 if that is 0. An element is x /
/// (scale * tensorScale), or 0 if the scale was rounded to 0. In a NaN block, elements are arbitrary codes with the
/// right sign.
void quantizeNvfp4(std::byte *target, std::byte *scales, float tensorScale, Format wide, const std::byte *source,
                   uint64_t count, ConvertOptions how = {});
/// Only the scales.
void scaleNvfp4(std::byte *scales, float tensorScale, Format wide, const std::byte *source, uint64_t count,
                ConvertOptions how = {});
void dequantizeNvfp4(Format wide, std::byte *target, const std::byte *source, const std::byte *scales,
                     float tensorScale, uint64_t count, ConvertOptions how = {});

} // namespace reshard::kernels
