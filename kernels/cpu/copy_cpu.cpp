// SPDX-License-Identifier: Apache-2.0
// Long rows are streamed past the caches, short rows that are contiguous in the target are collected in a buffer first,
// and rows of a few bytes are single loads and stores.
#include "kernels/cpu/streaming_stores.h"

#include "kernels/cpu/transpose.h"
#include "kernels/kernels.h"

#include <algorithm>
#include <cstring>

namespace reshard::kernels {

namespace {

/// Rows shorter than this that are not aligned to cache lines are not streamed one by one: too much of each row is its
/// partial first and last line, which usual stores write.
constexpr uint64_t kStreamRowBytes = 256;

/// For rows longer than this, the CPU's hardware prefetcher is sufficient with usual stores.
constexpr uint64_t kPrefetchRowBytes = 512;

/// Bytes of short rows that are collected before they are streamed; much less than the L1 cache.
constexpr uint64_t kCollectBytes = 2048;

/// Consecutive iterations of the innermost loop; strides in bytes.
struct CopiedRows {
  std::byte *target;
  const std::byte *source;
  uint64_t rowBytes, count;
  int64_t targetStride, sourceStride;
};

/// Prefetches all cache lines of a row, which may begin anywhere in a line.
void prefetchRow(const std::byte *row, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kLine)
    __builtin_prefetch(row + at);
  __builtin_prefetch(row + bytes - 1);
}

/// Rows of a size known at compile time are a load and a store; a call of memcpy would cost more than the row.
template <size_t Bytes> void copyFixed(CopiedRows rows) {
  const int64_t ahead = prefetchDistance(Bytes, rows.sourceStride);
  for (uint64_t i = 0; i < rows.count; ++i, rows.target += rows.targetStride, rows.source += rows.sourceStride) {
    if constexpr (Bytes >= kLine)
      prefetchRow(rows.source + ahead, Bytes);
    std::memcpy(rows.target, rows.source, Bytes);
  }
}

/// Copies rows of Half to 2 * Half bytes as their first and last Half bytes, which overlap.
template <size_t Half> void copyHalves(CopiedRows rows) {
  const uint64_t last = rows.rowBytes - Half;
  for (uint64_t i = 0; i < rows.count; ++i, rows.target += rows.targetStride, rows.source += rows.sourceStride) {
    std::memcpy(rows.target, rows.source, Half);
    std::memcpy(rows.target + last, rows.source + last, Half);
  }
}

void copyLong(CopiedRows rows) {
  const int64_t ahead = prefetchDistance(rows.rowBytes, rows.sourceStride);
  for (uint64_t i = 0; i < rows.count; ++i, rows.target += rows.targetStride, rows.source += rows.sourceStride) {
    if (rows.rowBytes <= kPrefetchRowBytes)
      prefetchRow(rows.source + ahead, rows.rowBytes);
    std::memcpy(rows.target, rows.source, rows.rowBytes);
  }
}

void copyPlain(const CopiedRows &rows) {
  switch (rows.rowBytes) {
  case 1:
    return copyFixed<1>(rows);
  case 2:
    return copyFixed<2>(rows);
  case 4:
    return copyFixed<4>(rows);
  case 8:
    return copyFixed<8>(rows);
  case 16:
    return copyFixed<16>(rows);
  case 32:
    return copyFixed<32>(rows);
  case 64:
    return copyFixed<64>(rows);
  case 128:
    return copyFixed<128>(rows);
  default:
    break;
  }
  if (rows.rowBytes < 4)
    return copyHalves<2>(rows);
  if (rows.rowBytes < 8)
    return copyHalves<4>(rows);
  if (rows.rowBytes < 16)
    return copyHalves<8>(rows);
  if (rows.rowBytes < 32)
    return copyHalves<16>(rows);
  if (rows.rowBytes < 64)
    return copyHalves<32>(rows);
  copyLong(rows);
}

uint64_t toNextLine(const std::byte *target) { return (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine; }

bool onLines(const CopiedRows &rows) {
  return rows.rowBytes % kLine == 0 && toNextLine(rows.target) == 0 &&
         rows.targetStride % static_cast<int64_t>(kLine) == 0;
}

/// Streams short rows that are contiguous in the target: collects them in a buffer, then streams whole lines.
void streamJoined(StreamLines stream, CopiedRows rows) {
  alignas(kLine) std::byte collected[kCollectBytes + kLine];
  // collected[skip, held) is the target from line + skip, so cache lines begin at the same offsets in both.
  uint64_t skip = reinterpret_cast<uintptr_t>(rows.target) % kLine, held = skip;
  std::byte *line = rows.target - skip;
  while (rows.count > 0) {
    const uint64_t count = std::min(rows.count, kCollectBytes / rows.rowBytes);
    copyPlain({collected + held, rows.source, rows.rowBytes, count, rows.targetStride, rows.sourceStride});
    rows.source += static_cast<int64_t>(count) * rows.sourceStride;
    rows.count -= count;
    held += count * rows.rowBytes;
    uint64_t lines = held / kLine, done = 0;
    if (skip > 0 && lines > 0) { // this call owns only a part of the first line
      std::memcpy(line + skip, collected + skip, kLine - skip);
      skip = 0;
      done = kLine;
      --lines;
    }
    if (lines > 0)
      stream({line + done, collected + done, 1, lines, 0, 0});
    done += lines * kLine;
    std::memcpy(collected, collected + done, held - done);
    line += done;
    held -= done;
  }
  std::memcpy(line + skip, collected + skip, held - skip);
}

void streamRow(StreamLines stream, std::byte *target, const std::byte *source, uint64_t bytes, int64_t sourceStride) {
  const uint64_t head = toNextLine(target), lines = (bytes - head) / kLine, tail = head + lines * kLine;
  __builtin_prefetch(source + prefetchDistance(bytes, sourceStride)); // `stream` prefetches only the ends of lines
  std::memcpy(target, source, head);
  stream({target + head, source + head, 1, lines, 0, sourceStride});
  std::memcpy(target + tail, source + tail, bytes - tail);
}

void streamRange(StreamLines stream, const CopiedRows &rows) {
  if (onLines(rows))
    return stream({rows.target, rows.source, rows.count, rows.rowBytes / kLine, rows.targetStride, rows.sourceStride});
  if (rows.rowBytes < kStreamRowBytes) {
    const bool joined =
        rows.targetStride == static_cast<int64_t>(rows.rowBytes) && rows.count * rows.rowBytes >= kCollectBytes;
    return joined ? streamJoined(stream, rows) : copyPlain(rows);
  }
  for (uint64_t i = 0; i < rows.count; ++i)
    streamRow(stream, rows.target + static_cast<int64_t>(i) * rows.targetStride,
              rows.source + static_cast<int64_t>(i) * rows.sourceStride, rows.rowBytes, rows.sourceStride);
}

} // namespace

void copyRowsAt(CpuLevel level, const StridedRows &all, bool stream) {
  const StreamLines streamLines = stream ? lineStreamer(level) : nullptr;
  const Strided &shape = all.shape;
  const Loop outer = innerLoop(shape, 1), inner = innerLoop(shape, 0);
  const bool transposed = transposes(shape);
  forBlocks(shape, all.first, all.count, [&](int64_t to, int64_t from, uint64_t steps, uint64_t rows) {
    if (transposed)
      return transposeBlock(level, streamLines,
                            {.target = all.target + to,
                             .source = all.source + from,
                             .elementBytes = shape.rowBytes,
                             .outer = {steps, outer.sourceStride, outer.targetStride},
                             .inner = {rows, inner.sourceStride, inner.targetStride}});
    for (uint64_t i = 0; i < steps; ++i) {
      const CopiedRows range = {all.target + to + static_cast<int64_t>(i) * outer.targetStride,
                                all.source + from + static_cast<int64_t>(i) * outer.sourceStride,
                                shape.rowBytes,
                                rows,
                                inner.targetStride,
                                inner.sourceStride};
      if (streamLines)
        streamRange(streamLines, range);
      else
        copyPlain(range);
    }
  });
  if (streamLines)
    finishStreaming();
}

void copyRows(const StridedRows &rows, bool stream) { copyRowsAt(cpuLevel(), rows, stream); }

void fillRows(std::byte *target, const Strided &shape, uint64_t first, uint64_t count) {
  const Loop outer = innerLoop(shape, 1), inner = innerLoop(shape, 0);
  forBlocks(shape, first, count, [&](int64_t to, int64_t, uint64_t steps, uint64_t rows) {
    for (uint64_t i = 0; i < steps; ++i)
      for (uint64_t k = 0; k < rows; ++k)
        std::memset(target + to + static_cast<int64_t>(i) * outer.targetStride +
                        static_cast<int64_t>(k) * inner.targetStride,
                    0, shape.rowBytes);
  });
}

} // namespace reshard::kernels
