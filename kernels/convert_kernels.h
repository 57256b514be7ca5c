// The table of row kernels of a CPU level; convert.cpp selects the level.
#pragma once

#include "kernels/formats.h"

namespace reshard::kernels {

/// Formats of 8 bits or more. The first kWideFormats of them can be quantized.
constexpr size_t kFormats = 5, kWideFormats = 3;

/// Adjacent elements that are multiplied or divided by one number. `stream` requires a target that is aligned to a
/// cache line.
struct ScaledRow {
  std::byte *target;
  const std::byte *source;
  uint64_t count;
  float factor;
  Overflow overflow;
  bool stream;
};

/// Adjacent elements and their scales, one for each block; blocks begin at the first element. Source and target are
/// elements and codes, or codes and elements. The tensor scale is used if the format has one.
struct BlockRow {
  std::byte *target;
  const std::byte *source;
  std::byte *scales;
  uint64_t count; // elements
  float tensorScale;
  bool stream;
};

/// Kernels of a format whose blocks lie in one row, by wide format. Those of other formats are null.
struct BlockKernels {
  void (*quantize[kWideFormats])(const BlockRow &row);
  void (*computeScales[kWideFormats])(const BlockRow &row);      ///< writes no target
  void (*quantizeWithScales[kWideFormats])(const BlockRow &row); ///< null for two codes in a byte
  void (*dequantize[kWideFormats])(const BlockRow &row);
};

/// The kernels of a level, by wide format, or by [from][to] for casts.
struct ConvertKernels {
  /// target = source * factor
  void (*multiply[kFormats][kFormats])(const ScaledRow &row);
  /// E4M3 target = source / factor
  void (*divide[kWideFormats])(const ScaledRow &row);
  /// Returns the fp32 bits of a matrix's amax; infinities and NaNs compare above all finite values. `stride` in bytes.
  uint32_t (*amax[kWideFormats])(const std::byte *source, uint64_t rows, uint64_t columns, int64_t stride);
  BlockKernels blocks[std::size(kQuantizedFormats)]; ///< by Quantization
};

extern const ConvertKernels kConvertPortable;
#if defined(__x86_64__)
extern const ConvertKernels kConvertAvx2, kConvertAvx512;
#endif

} // namespace reshard::kernels
