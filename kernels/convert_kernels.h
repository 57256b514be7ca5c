// The row kernels of each level, chosen by convert.cpp.
#pragma once

#include "kernels/formats.h"

namespace reshard::kernels {

/// Formats of 8 bits or more; the first kWideFormats of them are those that are quantised.
constexpr size_t kFormats = 5, kWideFormats = 3;

/// Kernels over rows of `count` contiguous elements, by wide format: [from][to] for casts. `stream` needs a target that
/// is a multiple of a line.
struct ConvertKernels {
  /// target = source * factor
  void (*multiply[kFormats][kFormats])(std::byte *target, const std::byte *source, uint64_t count, float factor,
                                       Overflow overflow, bool stream);
  /// E4M3 target = source / divisor
  void (*divide[kWideFormats])(std::byte *target, const std::byte *source, uint64_t count, float divisor, bool stream);
  /// Bits of the largest magnitude of a matrix as fp32, infinities and NaNs above all; `stride` in bytes.
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
