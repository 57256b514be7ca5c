// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/streaming_stores.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace reshard::kernels {

#if defined(__x86_64__)

namespace {

/// The position of a copy within rows of lines.
class LineWalk {
public:
  explicit LineWalk(const LineRows &rows) : target(rows.target), source(rows.source), rows_(rows) {}
  bool done() const { return row_ == rows_.rows; }
  /// Prefetches the end of a line, so that a row that begins within a line gets its last line too.
  void prefetch() const { __builtin_prefetch(source + ahead_ + (kLine - 1)); }
  void next() {
    target += kLine;
    source += kLine;
    if (++line_ < rows_.linesPerRow)
      return;
    line_ = 0;
    ++row_;
    target += rows_.targetStride - rowBytes_;
    source += rows_.sourceStride - rowBytes_;
  }

  std::byte *target;
  const std::byte *source;

private:
  const LineRows rows_;
  const int64_t rowBytes_ = static_cast<int64_t>(rows_.linesPerRow * kLine);
  const int64_t ahead_ = prefetchDistance(rows_.linesPerRow * kLine, rows_.sourceStride);
  uint64_t row_ = 0, line_ = 0;
};

void streamSse2(const LineRows &rows) {
  for (LineWalk at(rows); !at.done(); at.next()) {
    at.prefetch();
    for (int k = 0; k < 4; ++k)
      _mm_stream_si128(reinterpret_cast<__m128i *>(at.target) + k,
                       _mm_loadu_si128(reinterpret_cast<const __m128i *>(at.source) + k));
  }
}

__attribute__((target("avx2"))) void streamAvx2(const LineRows &rows) {
  for (LineWalk at(rows); !at.done(); at.next()) {
    at.prefetch();
    for (int k = 0; k < 2; ++k)
      _mm256_stream_si256(reinterpret_cast<__m256i *>(at.target) + k,
                          _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at.source) + k));
  }
}

} // namespace

CpuLevel cpuLevel() {
  static const CpuLevel level = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c"))
      return CpuLevel::Sse2;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? CpuLevel::Avx512 : CpuLevel::Avx2;
  }();
  return level;
}

StreamLines lineStreamer(CpuLevel level) {
  switch (level) {
  case CpuLevel::Avx512:
  case CpuLevel::Avx2:
    return streamAvx2;
  case CpuLevel::Sse2:
    return streamSse2;
  case CpuLevel::Portable:
    break;
  }
  return nullptr;
}

void finishStreaming() { _mm_sfence(); }

#else

CpuLevel cpuLevel() { return CpuLevel::Portable; }
StreamLines lineStreamer(CpuLevel) { return nullptr; }
void finishStreaming() {}

#endif

} // namespace reshard::kernels
