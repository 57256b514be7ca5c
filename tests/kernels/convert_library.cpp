// SPDX-License-Identifier: Apache-2.0
// A C interface to the conversions, for ml_dtypes_test.py. Element arrays are pointers; formats and levels are numbers.

#include "kernels/cpu/quantized.h"
#include "kernels/scales.h"

using namespace reshard;
using namespace reshard::kernels;

namespace {

ConvertOptions at(int level) { return {.stream = true, .level = static_cast<CpuLevel>(level)}; }

BlockMatrix matrix(int format, int wide, const int64_t shape[4], std::byte *codes, std::byte *scales,
                   float tensorScale) {
  return {static_cast<Quantization>(format),
          static_cast<NumberFormat>(wide),
          static_cast<uint64_t>(shape[0]),
          static_cast<uint64_t>(shape[1]),
          shape[2],
          shape[3],
          codes,
          scales,
          tensorScale};
}

ScaleMatrix scalesOf(int layout, const uint64_t shape[4], std::byte *scales) {
  return {scales, static_cast<ScaleLayout>(layout), {shape[0], shape[1], shape[2], shape[3]}};
}

} // namespace

extern "C" {

int convert_levels() { return static_cast<int>(cpuLevel()) + 1; }

void convert_cast(int level, int to, std::byte *target, int from, const std::byte *source, uint64_t count,
                  int overflow) {
  cast({static_cast<NumberFormat>(to), target, static_cast<NumberFormat>(from), source, count,
        static_cast<Overflow>(overflow)},
       at(level));
}

/// `shape`: rows, columns, and bytes from row to row of elements and of codes.
void convert_quantize(int level, int format, int wide, const int64_t shape[4], std::byte *codes, std::byte *scales,
                      float tensor_scale, const std::byte *source) {
  quantize(matrix(format, wide, shape, codes, scales, tensor_scale), source, at(level));
}

void convert_dequantize(int level, int format, int wide, const int64_t shape[4], std::byte *codes, std::byte *scales,
                        float tensor_scale, std::byte *target) {
  dequantize(matrix(format, wide, shape, codes, scales, tensor_scale), target, at(level));
}

float convert_amax(int level, int wide, const std::byte *source, uint64_t count) {
  return amax(static_cast<NumberFormat>(wide), source, {1, count, 0, 0}, at(level));
}

float convert_nvfp4_tensor_scale(float amax) { return nvfp4TensorScale(amax); }

/// `shape`: rows and columns of the scales, rows of a block, rows of the matrix. `slice`: row, column, rows, columns.
uint64_t convert_stored_scales(int layout, const uint64_t shape[4]) {
  return storedScales(static_cast<ScaleLayout>(layout), {shape[0], shape[1], shape[2], shape[3]});
}

void convert_write_scales(int layout, const uint64_t shape[4], std::byte *scales, const uint64_t slice[4],
                          const std::byte *plain, int64_t stride) {
  writeScales(scalesOf(layout, shape, scales), {slice[0], slice[1], slice[2], slice[3]}, plain, stride);
}

void convert_read_scales(int layout, const uint64_t shape[4], std::byte *scales, const uint64_t slice[4],
                         std::byte *plain, int64_t stride) {
  readScales(plain, stride, scalesOf(layout, shape, scales), {slice[0], slice[1], slice[2], slice[3]});
}

void convert_clear_padding(int layout, const uint64_t shape[4], std::byte *scales) {
  clearScalePadding(scalesOf(layout, shape, scales));
}
}
