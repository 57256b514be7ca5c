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

Level cpuLevel() {
  static const Level level = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c"))
      return Level::Sse2;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Level::Avx512 : Level::Avx2;
  }();
  return level;
}

StreamLines lineStreamer(Level level) {
  switch (level) {
  case Level::Avx512:
  case Level::Avx2:
    return streamAvx2;
  case Level::Sse2:
    return streamSse2;
  case Level::Portable:
    break;
  }
  return nullptr;
}

void finishStreaming() { _mm_sfence(); }

#else

Level cpuLevel() { return Level::Portable; }
StreamLines lineStreamer(Level) { return nullptr; }
void finishStreaming() {}

#endif

} // namespace reshard::kernels
