// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/convert_strided.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace reshard::kernels {

namespace {

/// Elements that are converted at a time: a multiple of every block size; their bytes fit in the L1 cache.
constexpr uint64_t kAtOnce = 2048;

/// Returns the index of the element at an address.
uint64_t number(const StorageForm &form, const ViewBase &base, const std::byte *at) {
  return static_cast<uint64_t>(at - base.begin) / itemBytes(form.stored);
}

/// Returns the number of rows of blocks before an element, which must begin a row of blocks or end the last one.
uint64_t blockRow(const Quantized &matrices, uint64_t element) {
  const uint64_t height = blockShape(matrices.format).rows, matrix = matrices.rows * matrices.columns;
  return element / matrix * ((matrices.rows + height - 1) / height) + element % matrix / matrices.columns / height;
}

/// Rows may be short, so streaming is finished once, after all rows.
ConvertOptions unfinished(bool stream) { return {.stream = stream, .finish = false}; }

void read(std::byte *target, const std::byte *source, uint64_t count, const Conversion &conversion, bool stream) {
  const uint64_t first = number(conversion.read, *conversion.from, source);
  if (conversion.read.kind == StorageForm::Kind::codes)
    encodeElements(conversion.from->matrices, {first, count}, target, source, unfinished(stream));
  else
    decodeElements(conversion.from->matrices, {first, count}, target, unfinished(stream));
}

/// A part at a time, whose source is in the L1 cache when it is cast.
void castElements(std::byte *target, const std::byte *source, uint64_t count, const StorageForm &form, bool stream) {
  const uint64_t each = form.overflowed ? kAtOnce : count;
  for (uint64_t at = 0; at < count; at += each) {
    const uint64_t some = std::min(each, count - at);
    const std::byte *const from = source + at * itemBytes(form.sent);
    if (form.overflowed && anyBeyond(form.stored, form.sent, from, some))
      std::atomic_ref(*form.overflowed).store(1, std::memory_order_relaxed);
    cast({.to = form.stored,
          .target = target + at * itemBytes(form.stored),
          .from = form.sent,
          .source = from,
          .count = some,
          .overflow = written(form.overflow)},
         unfinished(stream));
  }
}

void write(std::byte *target, const std::byte *source, uint64_t count, const Conversion &conversion, bool stream) {
  if (conversion.write.kind == StorageForm::Kind::cast)
    castElements(target, source, count, conversion.write, stream);
  else if (const Quantized &matrices = conversion.to->matrices; blockShape(matrices.format).rows == 1)
    quantizeBlocks(matrices, {number(conversion.write, *conversion.to, target), count}, source, unfinished(stream));
  else if (const uint64_t first = number(conversion.write, *conversion.to, target); true)
    quantizeRows(matrices, source - first * itemBytes(conversion.write.sent), blockRow(matrices, first),
                 blockRow(matrices, first + count) - blockRow(matrices, first), unfinished(stream));
}

void convertOne(std::byte *target, const std::byte *source, uint64_t bytes, const Conversion &conversion, bool stream) {
  const uint64_t count = bytes / (conversion.read ? conversion.read : conversion.write).item();
  if (!conversion.write)
    return read(target, source, count, conversion, stream);
  if (!conversion.read)
    return write(target, source, count, conversion, stream);
  alignas(64) std::byte between[kAtOnce * sizeof(float)];
  for (uint64_t at = 0; at < count; at += kAtOnce) {
    const uint64_t some = std::min(kAtOnce, count - at);
    read(between, source + at * itemBytes(conversion.read.stored), some, conversion, false);
    write(target + at * itemBytes(conversion.write.stored), between, some, conversion, stream);
  }
}

} // namespace

void convertRow(std::byte *target, const std::byte *source, uint64_t bytes, const Conversion &conversion, bool stream) {
  convertOne(target, source, bytes, conversion, stream);
  if (stream)
    finishStreaming();
}

void convertRows(const StridedRows &all, const Conversion &conversion, bool stream) {
  const Loop outer = innerLoop(all.shape, 1), inner = innerLoop(all.shape, 0);
  forBlocks(all.shape, all.first, all.count, [&](int64_t to, int64_t from, uint64_t steps, uint64_t rows) {
    for (uint64_t i = 0; i < steps; ++i)
      for (uint64_t k = 0; k < rows; ++k)
        convertOne(all.target + to + static_cast<int64_t>(i) * outer.targetStride +
                       static_cast<int64_t>(k) * inner.targetStride,
                   all.source ? all.source + from + static_cast<int64_t>(i) * outer.sourceStride +
                                    static_cast<int64_t>(k) * inner.sourceStride
                              : nullptr,
                   all.shape.rowBytes, conversion, stream);
  });
  if (stream)
    finishStreaming();
}

} // namespace reshard::kernels
