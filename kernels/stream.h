// Stores that by-pass the cache, which spare the read of the target that a usual store begins with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reshard::kernels {

/// What the CPU can do; each level has those below it. Portable: no streaming stores, any CPU. Avx2 has F16C too,
/// Avx512 is F, BW, DQ and VL.
enum class Level { Portable, Sse2, Avx2, Avx512 };

/// The highest level of this CPU, found once.
Level cpuLevel();

/// Bytes of a cache line, and how far ahead of its use a source is prefetched.
constexpr uint64_t kLine = 64, kAhead = 2048;

/// Bytes from where a row is read to where it pays to prefetch: some rows on, or further in the row where it is long.
constexpr int64_t prefetchDistance(uint64_t rowBytes, int64_t sourceStride) {
  return rowBytes > 2 * kAhead ? static_cast<int64_t>(kAhead)
                               : static_cast<int64_t>((kAhead + rowBytes - 1) / rowBytes) * sourceStride;
}

/// Rows of whole lines, at least one line each; strides in bytes. The target and its stride are multiples of a line,
/// the source lies anywhere.
struct LineRows {
  std::byte *target;
  const std::byte *source;
  uint64_t rows, linesPerRow;
  int64_t targetStride, sourceStride;
};

/// Copies rows of lines past the cache, prefetching the source.
using StreamLines = void (*)(const LineRows &rows);

/// That of a level; null for Portable. (AVX-512 was measured to copy no faster than AVX2.)
StreamLines lineStreamer(Level level);

/// Puts what was streamed before later stores, so that another thread may read it.
void finishStreaming();

} // namespace reshard::kernels
