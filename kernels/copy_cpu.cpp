#include "kernels/kernels.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace reshard::kernels {

uint64_t Strided::rows() const {
  uint64_t rows = 1;
  for (size_t l = 0; l < loopCount; ++l)
    rows *= loops[l].count;
  return rows;
}

void simplify(Strided &shape) {
  size_t kept = 0;
  for (size_t l = 0; l < shape.loopCount; ++l) {
    const Loop loop = shape.loops[l];
    if (loop.count == 1)
      continue;
    if (kept > 0) {
      Loop &outer = shape.loops[kept - 1];
      const auto count = static_cast<int64_t>(loop.count);
      if (outer.sourceStride == count * loop.sourceStride && outer.targetStride == count * loop.targetStride) {
        outer = {outer.count * loop.count, loop.sourceStride, loop.targetStride};
        continue;
      }
    }
    shape.loops[kept++] = loop;
  }
  while (kept > 0 && shape.loops[kept - 1].sourceStride == static_cast<int64_t>(shape.rowBytes) &&
         shape.loops[kept - 1].targetStride == static_cast<int64_t>(shape.rowBytes))
    shape.rowBytes *= shape.loops[--kept].count;
  shape.loopCount = kept;
}

namespace {

/// Rows shorter than this are not worth a streaming store: their first and last lines are written the usual way.
constexpr uint64_t kStreamRowBytes = 256;

#if defined(__x86_64__)

/// Whole lines of 64 bytes by streaming stores, which spare the read of the target that a usual store begins with; what is not on a
/// line's boundary by memcpy. Some lines ahead are prefetched from the source. SSE2 is in every x86-64 and fills a line as well.
void streamRow(std::byte *target, const std::byte *source, uint64_t bytes) {
  constexpr uint64_t kLine = 64, kAhead = 512;
  const uint64_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  std::memcpy(target, source, head);
  target += head;
  source += head;
  bytes -= head;
  for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
    __builtin_prefetch(source + kAhead);
    for (int i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i *>(target) + i, _mm_loadu_si128(reinterpret_cast<const __m128i *>(source) + i));
  }
  std::memcpy(target, source, bytes);
}

void finishStreaming() { _mm_sfence(); }

#else

void streamRow(std::byte *target, const std::byte *source, uint64_t bytes) { std::memcpy(target, source, bytes); }
void finishStreaming() {}

#endif

/// Rows whose size the compiler knows are a load and a store; the call of memcpy would cost more than the row.
template <size_t Bytes>
void copyFixed(std::byte *target, const std::byte *source, uint64_t count, int64_t targetStride, int64_t sourceStride) {
  for (uint64_t i = 0; i < count; ++i, target += targetStride, source += sourceStride)
    std::memcpy(target, source, Bytes);
}

void copyInner(std::byte *target, const std::byte *source, uint64_t rowBytes, uint64_t count, int64_t targetStride,
               int64_t sourceStride) {
  switch (rowBytes) {
  case 1: return copyFixed<1>(target, source, count, targetStride, sourceStride);
  case 2: return copyFixed<2>(target, source, count, targetStride, sourceStride);
  case 4: return copyFixed<4>(target, source, count, targetStride, sourceStride);
  case 8: return copyFixed<8>(target, source, count, targetStride, sourceStride);
  case 16: return copyFixed<16>(target, source, count, targetStride, sourceStride);
  case 32: return copyFixed<32>(target, source, count, targetStride, sourceStride);
  case 64: return copyFixed<64>(target, source, count, targetStride, sourceStride);
  case 128: return copyFixed<128>(target, source, count, targetStride, sourceStride);
  default:
    for (uint64_t i = 0; i < count; ++i, target += targetStride, source += sourceStride)
      std::memcpy(target, source, rowBytes);
  }
}

void fillInner(std::byte *target, uint64_t rowBytes, uint64_t count, int64_t targetStride) {
  for (uint64_t i = 0; i < count; ++i, target += targetStride)
    std::memset(target, 0, rowBytes);
}

/// Walks rows [first, first + count) and calls visit(target offset, source offset, rows) for each stretch of the innermost loop.
template <class Visit> void forStretches(const Strided &shape, uint64_t first, uint64_t count, Visit visit) {
  if (shape.loopCount == 0) {
    visit(0, 0, count);
    return;
  }
  const size_t inner = shape.loopCount - 1;
  uint64_t at[kMaxLoops];
  int64_t target = 0, source = 0;
  for (size_t l = shape.loopCount; l-- > 0;) {
    at[l] = first % shape.loops[l].count;
    first /= shape.loops[l].count;
    target += static_cast<int64_t>(at[l]) * shape.loops[l].targetStride;
    source += static_cast<int64_t>(at[l]) * shape.loops[l].sourceStride;
  }
  while (count > 0) {
    const uint64_t stretch = std::min(count, shape.loops[inner].count - at[inner]);
    visit(target, source, stretch);
    count -= stretch;
    at[inner] += stretch;
    target += static_cast<int64_t>(stretch) * shape.loops[inner].targetStride;
    source += static_cast<int64_t>(stretch) * shape.loops[inner].sourceStride;
    for (size_t l = inner; l > 0 && at[l] == shape.loops[l].count; --l) {
      target += shape.loops[l - 1].targetStride - static_cast<int64_t>(shape.loops[l].count) * shape.loops[l].targetStride;
      source += shape.loops[l - 1].sourceStride - static_cast<int64_t>(shape.loops[l].count) * shape.loops[l].sourceStride;
      at[l] = 0;
      ++at[l - 1];
    }
  }
}

} // namespace

void copyRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count, bool stream) {
  const int64_t targetStride = shape.loopCount ? shape.loops[shape.loopCount - 1].targetStride : 0;
  const int64_t sourceStride = shape.loopCount ? shape.loops[shape.loopCount - 1].sourceStride : 0;
  stream = stream && shape.rowBytes >= kStreamRowBytes;
  forStretches(shape, first, count, [&](int64_t to, int64_t from, uint64_t rows) {
    if (!stream)
      return copyInner(target + to, source + from, shape.rowBytes, rows, targetStride, sourceStride);
    for (uint64_t i = 0; i < rows; ++i)
      streamRow(target + to + static_cast<int64_t>(i) * targetStride, source + from + static_cast<int64_t>(i) * sourceStride, shape.rowBytes);
  });
  if (stream)
    finishStreaming();
}

void fillRows(std::byte *target, const Strided &shape, uint64_t first, uint64_t count) {
  const int64_t targetStride = shape.loopCount ? shape.loops[shape.loopCount - 1].targetStride : 0;
  forStretches(shape, first, count,
               [&](int64_t to, int64_t, uint64_t rows) { fillInner(target + to, shape.rowBytes, rows, targetStride); });
}

} // namespace reshard::kernels
