#include "kernels/convert.h"

#include "kernels/convert_kernels.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>

namespace reshard::kernels {

namespace {

const ConvertKernels &kernels(Level level) {
#if defined(__x86_64__)
  if (level >= Level::Avx512)
    return kConvertAvx512;
  if (level >= Level::Avx2)
    return kConvertAvx2;
#endif
  (void)level;
  return kConvertPortable;
}

size_t wideIndex(Format wide) {
  assert(static_cast<size_t>(wide) < kWideFormats);
  return static_cast<size_t>(wide);
}

/// Streaming needs a target that is aligned to whole lines; other targets are written with usual stores.
bool streams(const ConvertOptions &how, const std::byte *target) {
  return how.stream && how.level != Level::Portable && reinterpret_cast<uintptr_t>(target) % kLine == 0;
}

/// Ends a conversion, so that another thread may read the target.
void finish(const ConvertOptions &how) {
  if (how.stream && how.finish)
    finishStreaming();
}

float fromMagnitude(uint32_t bits) {
  return bits < encoding(Format::fp32).infinity ? std::bit_cast<float>(bits) : std::numeric_limits<float>::quiet_NaN();
}

/// Calls visit(block's matrix, first target byte, first source byte, index of its scale) for each block of FP8.
template <class Visit> void forBlocks(const Matrix &matrix, uint64_t targetBytes, uint64_t sourceBytes, Visit visit) {
  uint64_t index = 0;
  for (uint64_t row = 0; row < matrix.rows; row += kFp8Block)
    for (uint64_t column = 0; column < matrix.columns; column += kFp8Block, ++index)
      visit(Matrix{std::min(kFp8Block, matrix.rows - row), std::min(kFp8Block, matrix.columns - column),
                   matrix.targetStride, matrix.sourceStride},
            static_cast<int64_t>(row) * matrix.targetStride + static_cast<int64_t>(column * targetBytes),
            static_cast<int64_t>(row) * matrix.sourceStride + static_cast<int64_t>(column * sourceBytes), index);
}

/// Calls visit(target offset, source offset) for each row.
template <class Visit> void forRows(const Matrix &matrix, Visit visit) {
  for (uint64_t row = 0; row < matrix.rows; ++row)
    visit(static_cast<int64_t>(row) * matrix.targetStride, static_cast<int64_t>(row) * matrix.sourceStride);
}

void divideRows(std::byte *target, float scale, Format wide, const std::byte *source, const Matrix &matrix,
                const ConvertOptions &how) {
  const auto divide = kernels(how.level).divide[wideIndex(wide)];
  forRows(matrix, [&](int64_t to, int64_t from) {
    divide(target + to, source + from, matrix.columns, scale, streams(how, target + to));
  });
}

void multiplyRows(Format wide, std::byte *target, const std::byte *source, float scale, const Matrix &matrix,
                  const ConvertOptions &how) {
  const auto multiply = kernels(how.level).multiply[static_cast<size_t>(Format::fp8_e4m3)][wideIndex(wide)];
  forRows(matrix, [&](int64_t to, int64_t from) {
    multiply(target + to, source + from, matrix.columns, scale, Overflow::infinity, streams(how, target + to));
  });
}

} // namespace

void cast(Format to, std::byte *target, Format from, const std::byte *source, uint64_t count, Overflow overflow,
          ConvertOptions how) {
  const auto multiply = kernels(how.level).multiply[static_cast<size_t>(from)][static_cast<size_t>(to)];
  assert(multiply);
  multiply(target, source, count, 1, overflow, streams(how, target));
  finish(how);
}

void quantizeMxfp8(std::byte *target, std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                   ConvertOptions how) {
  kernels(how.level).quantizeMxfp8[wideIndex(wide)](target, scales, source, count, streams(how, target));
  finish(how);
}

void scaleMxfp8(std::byte *scales, Format wide, const std::byte *source, uint64_t count, ConvertOptions how) {
  kernels(how.level).scaleMxfp8[wideIndex(wide)](scales, source, count);
}

void encodeMxfp8(std::byte *target, const std::byte *scales, Format wide, const std::byte *source, uint64_t count,
                 ConvertOptions how) {
  kernels(how.level).encodeMxfp8[wideIndex(wide)](target, scales, source, count, streams(how, target));
  finish(how);
}

void dequantizeMxfp8(Format wide, std::byte *target, const std::byte *source, const std::byte *scales, uint64_t count,
                     ConvertOptions how) {
  kernels(how.level).dequantizeMxfp8[wideIndex(wide)](target, source, scales, count, streams(how, target));
  finish(how);
}

float amax(Format wide, const std::byte *source, const Matrix &matrix, ConvertOptions how) {
  return fromMagnitude(
      kernels(how.level).amax[wideIndex(wide)](source, matrix.rows, matrix.columns, matrix.sourceStride));
}

float fp8Scale(float amax) {
  const float scale = amax / 448;
  return scale == 0 ? 1 : scale;
}

void quantizeFp8(std::byte *target, float scale, Format wide, const std::byte *source, const Matrix &matrix,
                 ConvertOptions how) {
  divideRows(target, scale, wide, source, matrix, how);
  finish(how);
}

void dequantizeFp8(Format wide, std::byte *target, const std::byte *source, float scale, const Matrix &matrix,
                   ConvertOptions how) {
  multiplyRows(wide, target, source, scale, matrix, how);
  finish(how);
}

void quantizeBlockFp8(std::byte *target, float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                      ConvertOptions how) {
  forBlocks(matrix, 1, itemBytes(wide), [&](const Matrix &block, int64_t to, int64_t from, uint64_t index) {
    scales[index] = fp8Scale(amax(wide, source + from, block, how));
    divideRows(target + to, scales[index], wide, source + from, block, how);
  });
  finish(how);
}

void encodeBlockFp8(std::byte *target, const float *scales, Format wide, const std::byte *source, const Matrix &matrix,
                    ConvertOptions how) {
  forBlocks(matrix, 1, itemBytes(wide), [&](const Matrix &block, int64_t to, int64_t from, uint64_t index) {
    divideRows(target + to, scales[index], wide, source + from, block, how);
  });
  finish(how);
}

void dequantizeBlockFp8(Format wide, std::byte *target, const std::byte *source, const float *scales,
                        const Matrix &matrix, ConvertOptions how) {
  forBlocks(matrix, itemBytes(wide), 1, [&](const Matrix &block, int64_t to, int64_t from, uint64_t index) {
    multiplyRows(wide, target + to, source + from, scales[index], block, how);
  });
  finish(how);
}

float nvfp4TensorScale(float amax) {
  const float scale = amax / (448 * 6);
  return scale == 0 ? 1 : scale;
}

void quantizeNvfp4(std::byte *target, std::byte *scales, float tensorScale, Format wide, const std::byte *source,
                   uint64_t count, ConvertOptions how) {
  kernels(how.level).quantizeNvfp4[wideIndex(wide)](target, scales, tensorScale, source, count, streams(how, target));
  finish(how);
}

void scaleNvfp4(std::byte *scales, float tensorScale, Format wide, const std::byte *source, uint64_t count,
                ConvertOptions how) {
  kernels(how.level).scaleNvfp4[wideIndex(wide)](scales, tensorScale, source, count);
}

void dequantizeNvfp4(Format wide, std::byte *target, const std::byte *source, const std::byte *scales,
                     float tensorScale, uint64_t count, ConvertOptions how) {
  kernels(how.level).dequantizeNvfp4[wideIndex(wide)](target, source, scales, tensorScale, count, streams(how, target));
  finish(how);
}

} // namespace reshard::kernels
