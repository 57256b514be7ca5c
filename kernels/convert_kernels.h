// The table of row kernels of a CPU level; convert.cpp selects the level.
#pragma once

#include "kernels/formats.h"

namespace reshard::kernels {

/// Formats of 8 bits or more. The first kWideFormats of them can be quantized.
constexpr size_t kFormats = 5, kWideFormats = 3;

/// Kernels over rows of `count` contiguous elements, indexed by wide format, or by [from][to] for casts. `stream`
/// requires a target that is aligned to a cache line.
struct ConvertKernels {
  /// target = source * factor
  void (*multiply[kFormats][kFormats])(std::byte *target, const std::byte *source, uint64_t count, float factor,
                                       Overflow overflow, bool stream);
  /// E4M3 target = source / divisor
  void (*divide[kWideFormats])(std::byte *target, const std::byte *source, uint64_t count, float divisor, bool stream);
  /// Returns the fp32 bits of a matrix's amax; infinities and NaNs compare above all finite values. `stride` in bytes.
  uint32_t (*amax[kWideFormats])(const std::byte *source, uint64_t rows, uint64_t columns, int64_t stride);
  void (*quantizeMxfp8[kWideFormats])(std::byte *target, std::byte *scales, const std::byte *source, uint64_t count,
                                      bool stream);
  void (*scaleMxfp8[kWideFormats])(std::byte *scales, const std::byte *source, uint64_t count);
  void (*encodeMxfp8[kWideFormats])(std::byte *target, const std::byte *scales, const std::byte *source, uint64_t count,
                                    bool stream);
  void (*dequantizeMxfp8[kWideFormats])(std::byte *target, const std::byte *source, const std::byte *scales,
                                        uint64_t count, bool stream);
  void (*quantizeNvfp4[kWideFormats])(std::byte *target, std::byte *scales, float tensorScale, const std::byte *source,
                                      uint64_t count, bool stream);
  void (*scaleNvfp4[kWideFormats])(std::byte *scales, float tensorScale, const std::byte *source, uint64_t count);
  void (*dequantizeNvfp4[kWideFormats])(std::byte *target, const std::byte *source, const std::byte *scales,
                                        float tensorScale, uint64_t count, bool stream);
};

extern const ConvertKernels kConvertPortable;
#if defined(__x86_64__)
extern const ConvertKernels kConvertAvx2, kConvertAvx512;
#endif

} // namespace reshard::kernels
