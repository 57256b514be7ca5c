// SPDX-License-Identifier: Apache-2.0
// Non-temporal stores: they bypass the cache and avoid the read of the target line with which a usual store begins.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reshard::kernels {

/// Instruction sets of the CPU; each level includes those below it. Portable: any CPU, no non-temporal stores. Avx2
/// includes F16C; Avx512 is F, BW, DQ and VL.
enum class CpuLevel { Portable, Sse2, Avx2, Avx512 };

/// Returns the highest level of this CPU; detected once.
CpuLevel cpuLevel();

/// Bytes of a cache line, and the prefetch distance in bytes.
constexpr uint64_t kLine = 64, kAhead = 2048;

/// Returns the distance in bytes from the current read to the prefetch: some rows further, or further within a long
/// row.
constexpr int64_t prefetchDistance(uint64_t rowBytes, int64_t sourceStride) {
  return rowBytes > 2 * kAhead ? static_cast<int64_t>(kAhead)
                               : static_cast<int64_t>((kAhead + rowBytes - 1) / rowBytes) * sourceStride;
}

/// Rows of whole cache lines, at least one line each. Strides are in bytes. The target and its stride are multiples of
/// a line; the source has any alignment.
struct LineRows {
  std::byte *target;
  const std::byte *source;
  uint64_t rows, linesPerRow;
  int64_t targetStride, sourceStride;
};

/// Copies rows of lines with non-temporal stores and prefetches the source.
using StreamLines = void (*)(const LineRows &rows);

/// Returns the line copier of a level; null for Portable. AVX-512 was measured to be no faster than AVX2.
StreamLines lineStreamer(CpuLevel level);

/// Store fence: orders streamed stores before later stores, so that another thread may read the target.
void finishStreaming();

} // namespace reshard::kernels
