// SPDX-License-Identifier: Apache-2.0
// The table of row kernels of a CPU level; convert.cpp selects the level.
#pragma once

#include "kernels/number_formats.h"

namespace reshard::kernels {

/// Formats of 8 bits or more. The first kWideFormats of them can be quantized.
constexpr size_t kFormats = 5, kWideFormats = 3;

// Rows are `count` adjacent elements. They may be short, so parameters are passed in registers: a struct of all of them
// takes 4 ns more for each row, a sixth of the time of 128 elements.

/// How a row is written. `stream` requires a target that is aligned to a cache line.
struct Writing {
  Overflow overflow;
  bool stream;
};

/// The scales of a row, one for each block; blocks begin at the first element. The tensor scale is used if the format
/// has one.
struct BlockScales {
  std::byte *scales;
  float tensorScale;
};

/// Kernels of a format whose blocks lie in one row, by wide format. Those of other formats are null.
struct BlockKernels {
  void (*quantize[kWideFormats])(std::byte *codes, BlockScales scales, const std::byte *source, uint64_t count,
                                 bool stream);
  void (*computeScales[kWideFormats])(BlockScales scales, const std::byte *source, uint64_t count);
  void (*quantizeWithScales[kWideFormats])(std::byte *codes, BlockScales scales, const std::byte *source,
                                           uint64_t count, bool stream); ///< null for two codes in a byte
  void (*dequantize[kWideFormats])(std::byte *target, BlockScales scales, const std::byte *codes, uint64_t count,
                                   bool stream);
};

/// The kernels of a level, by wide format, or by [from][to] for casts.
struct ConvertKernels {
  /// target = source * factor
  void (*multiply[kFormats][kFormats])(std::byte *target, const std::byte *source, uint64_t count, float factor,
                                       Writing how);
  /// E4M3 target = source / divisor; saturates
  void (*divide[kWideFormats])(std::byte *target, const std::byte *source, uint64_t count, float divisor, Writing how);
  /// Returns the fp32 bits of a matrix's amax; infinities and NaNs compare above all finite values. `stride` in bytes.
  uint32_t (*amax[kWideFormats])(const std::byte *source, uint64_t rows, uint64_t columns, int64_t stride);
  BlockKernels blocks[std::size(kQuantizedFormats)]; ///< by Quantization
};

extern const ConvertKernels kConvertPortable;
#if defined(__x86_64__)
extern const ConvertKernels kConvertAvx2, kConvertAvx512;
#endif

} // namespace reshard::kernels
