// A C interface to the conversions, for convert_test.py. Element arrays are pointers; formats and levels are numbers.

#include "kernels/convert.h"
#include "kernels/scales.h"

using namespace reshard::kernels;

namespace {

ConvertOptions at(int level) { return {.stream = true, .level = static_cast<Level>(level)}; }

} // namespace

extern "C" {

int convert_levels() { return static_cast<int>(cpuLevel()) + 1; }

void convert_cast(int level, int to, std::byte *target, int from, const std::byte *source, uint64_t count,
                  int overflow) {
  cast(static_cast<Format>(to), target, static_cast<Format>(from), source, count, static_cast<Overflow>(overflow),
       at(level));
}

void convert_quantize_mxfp8(int level, std::byte *target, std::byte *scales, int wide, const std::byte *source,
                            uint64_t count) {
  quantizeMxfp8(target, scales, static_cast<Format>(wide), source, count, at(level));
}

void convert_dequantize_mxfp8(int level, int wide, std::byte *target, const std::byte *source, const std::byte *scales,
                              uint64_t count) {
  dequantizeMxfp8(static_cast<Format>(wide), target, source, scales, count, at(level));
}

void convert_quantize_block_fp8(int level, std::byte *target, float *scales, int wide, const std::byte *source,
                                uint64_t rows, uint64_t columns, int64_t target_stride, int64_t source_stride) {
  quantizeBlockFp8(target, scales, static_cast<Format>(wide), source, {rows, columns, target_stride, source_stride},
                   at(level));
}

void convert_dequantize_block_fp8(int level, int wide, std::byte *target, const std::byte *source, const float *scales,
                                  uint64_t rows, uint64_t columns, int64_t target_stride, int64_t source_stride) {
  dequantizeBlockFp8(static_cast<Format>(wide), target, source, scales, {rows, columns, target_stride, source_stride},
                     at(level));
}

float convert_amax(int level, int wide, const std::byte *source, uint64_t count) {
  return amax(static_cast<Format>(wide), source, {1, count, 0, 0}, at(level));
}

float convert_nvfp4_tensor_scale(float amax) { return nvfp4TensorScale(amax); }

void convert_quantize_nvfp4(int level, std::byte *target, std::byte *scales, float tensor_scale, int wide,
                            const std::byte *source, uint64_t count) {
  quantizeNvfp4(target, scales, tensor_scale, static_cast<Format>(wide), source, count, at(level));
}

void convert_dequantize_nvfp4(int level, int wide, std::byte *target, const std::byte *source, const std::byte *scales,
                              float tensor_scale, uint64_t count) {
  dequantizeNvfp4(static_cast<Format>(wide), target, source, scales, tensor_scale, count, at(level));
}

uint64_t convert_swizzled_bytes(uint64_t rows, uint64_t columns) { return swizzledBytes({rows, columns}); }

void convert_swizzle(std::byte *swizzled, uint64_t rows, uint64_t columns, const uint64_t slice[4],
                     const std::byte *plain, int64_t stride) {
  swizzleScales(swizzled, {rows, columns}, {slice[0], slice[1], slice[2], slice[3]}, plain, stride);
}

void convert_unswizzle(std::byte *plain, int64_t stride, const std::byte *swizzled, uint64_t rows, uint64_t columns,
                       const uint64_t slice[4]) {
  unswizzleScales(plain, stride, swizzled, {rows, columns}, {slice[0], slice[1], slice[2], slice[3]});
}

void convert_clear_padding(std::byte *swizzled, uint64_t rows, uint64_t columns) {
  clearScalePadding(swizzled, {rows, columns});
}
}
