// Casts and quantisation of contiguous elements on the CPU. Nothing here allocates or fails; what the formats cannot
// hold is stated.
//
// Elements are rounded to the nearest value, ties to the even code; arithmetic is fp32's. Source and target must not
// overlap and may lie anywhere. Quantised formats carry a scale for each block, the factor that dequantisation
// multiplies by. The scale of a block that holds a NaN or an infinity is NaN, so that the whole block is: no weight
// that is not finite comes out finite. Quantisation is from fp32, bf16 and fp16, dequantisation to them ("wide" below).
// A last block that is shorter has a scale of its own elements. `stream` is that of copyRows.
#pragma once

#include "kernels/formats.h"
#include "kernels/stream.h"

namespace reshard::kernels {

/// Elements of a block of MXFP8 and NVFP4, and rows and columns of one of block FP8.
constexpr uint64_t kMxBlock = 32, kNvfp4Block = 16, kFp8Block = 128;

/// How to convert; `level` must not be above cpuLevel(), and all levels give the same bytes.
struct ConvertOptions {
  bool stream = false;
  Level level = cpuLevel();
  bool finish = true; ///< false: the caller calls finishStreaming() once, behind many short conversions, each of which
                      ///< would wait for its lines
};

/// `count` elements to another format, of 8 bits or more on both sides. Equal formats are copied elsewhere: NaNs and
/// all.
void cast(Format to, std::byte *target, Format from, const std::byte *source, uint64_t count, Overflow overflow,
          ConvertOptions how = {});

/// MXFP8 (OCP Microscaling 1.0): E4M3 elements and ceil(count / 32) scales in E8M0. The scale is the smallest power of
/// two with which nothing saturates, 2^ceil(log2(amax / 448)), as Megatron-Core, FlashInfer and Transformer Engine have
/// it (not 2^(floor(log2(amax)) - 8), the example of OCP's text, which saturates); that of zeros is 2^-127, code 0.
void quantizeMxfp8(std::byte *target, std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                   ConvertOptions how = {});
void dequantizeMxfp8(Format wide, std::byte *target, const std::byte *source, const std::byte *scales, uint64_t count,
                     ConvertOptions how = {});

/// The scales alone, and the elements alone with scales that are there: what quantizeMxfp8 gives with these, NaN where
/// such a scale is too small.
void scaleMxfp8(std::byte *scales, Format wide, const std::byte *source, uint64_t count, ConvertOptions how = {});
void encodeMxfp8(std::byte *target, const std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                 ConvertOptions how = {});

/// A matrix on both sides; strides between rows in bytes.
struct Matrix {
  uint64_t rows, columns;
  int64_t targetStride, sourceStride;
};

/// The largest magnitude of a matrix (targetStride does not matter): 0 where it has no element, NaN where it holds a
/// NaN or an infinity.
float amax(Format wide, const std::byte *source, const Matrix &matrix, ConvertOptions how = {});

/// The scale of a block of FP8 with this amax: amax / 448, or 1 where that is 0. DeepSeek stores it as
/// `weight_scale_inv`.
float fp8Scale(float amax);

/// E4M3 elements x / scale (saturating) of a matrix, and back: x * scale. For blocks whose scale is known, as those
/// that are cut between ranks.
void quantizeFp8(std::byte *target, float scale, Format wide, const std::byte *source, const Matrix &matrix,
                 ConvertOptions how = {});
void dequantizeFp8(Format wide, std::byte *target, const std::byte *source, float scale, const Matrix &matrix,
                   ConvertOptions how = {});

/// Block FP8 as DeepSeek's checkpoints have it: blocks of 128 x 128 from the matrix' first element on, with their
/// fp8Scale. `scales` is row-major, a row of ceil(columns / 128) for each 128 rows.
void quantizeBlockFp8(std::byte *target, float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                      ConvertOptions how = {});
/// The elements alone, with scales that are there.
void encodeBlockFp8(std::byte *target, const float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                    ConvertOptions how = {});
void dequantizeBlockFp8(Format wide, std::byte *target, const std::byte *source, const float *scales,
                        const Matrix &matrix, ConvertOptions how = {});

/// The scale of an NVFP4 tensor with this amax, that of all its parts: amax / (448 * 6), or 1 where that is 0
/// (`weight_scale_2` of ModelOpt).
float nvfp4TensorScale(float amax);

/// NVFP4 as ModelOpt writes it: E2M1 elements, two in a byte, the first in the low bits (an odd last one has 0 beside
/// it), and ceil(count / 16) scales in E4M3: amax / (6 * tensorScale), saturating, 1 where that is 0. An element is x /
/// (scale * tensorScale), or 0 where that scale was rounded to 0; in a block that is NaN it is some code of its sign.
void quantizeNvfp4(std::byte *target, std::byte *scales, float tensorScale, Format wide, const std::byte *source,
                   uint64_t count, ConvertOptions how = {});
/// The scales alone.
void scaleNvfp4(std::byte *scales, float tensorScale, Format wide, const std::byte *source, uint64_t count,
                ConvertOptions how = {});
void dequantizeNvfp4(Format wide, std::byte *target, const std::byte *source, const std::byte *scales,
                     float tensorScale, uint64_t count, ConvertOptions how = {});

} // namespace reshard::kernels
