#include "kernels/change_rows.h"

#include <algorithm>
#include <cstring>

namespace reshard::kernels {

namespace {

/// The number of the element at an address.
uint64_t number(const Form &form, const Shown &shown, const std::byte *at) {
  return static_cast<uint64_t>(at - shown.begin) / itemBytes(form.stands);
}

/// Rows of blocks before that of an element, which begins one, or is the last one's end.
uint64_t blockRow(const Quantized &matrices, uint64_t element) {
  const uint64_t height = blockShape(matrices.format).rows, matrix = matrices.rows * matrices.columns;
  return element / matrix * ((matrices.rows + height - 1) / height) + element % matrix / matrices.columns / height;
}

/// Rows may be short: finished once, behind all of them.
Conversion unfinished(bool stream) { return {.stream = stream, .finish = false}; }

void read(std::byte *target, const std::byte *source, uint64_t count, const Change &change, bool stream) {
  const uint64_t first = number(change.read, *change.from, source);
  if (change.read.kind == Form::Kind::codes)
    encodeElements(change.from->matrices, first, target, source, count, unfinished(stream));
  else
    decodeElements(change.from->matrices, first, target, count, unfinished(stream));
}

void write(std::byte *target, const std::byte *source, uint64_t count, const Change &change, bool stream) {
  if (change.write.kind == Form::Kind::cast)
    cast(change.write.stands, target, change.write.goes, source, count, Overflow::saturate, unfinished(stream));
  else if (const Quantized &matrices = change.to->matrices; blockShape(matrices.format).rows == 1)
    quantizeBlocks(matrices, number(change.write, *change.to, target), source, count, unfinished(stream));
  else if (const uint64_t first = number(change.write, *change.to, target); true)
    quantizeRows(matrices, source - first * itemBytes(change.write.goes), blockRow(matrices, first),
                 blockRow(matrices, first + count) - blockRow(matrices, first), unfinished(stream));
}

void changeOne(std::byte *target, const std::byte *source, uint64_t bytes, const Change &change, bool stream) {
  const uint64_t count = bytes / (change.read ? change.read : change.write).item();
  if (!change.write)
    return read(target, source, count, change, stream);
  if (!change.read)
    return write(target, source, count, change, stream);
  constexpr uint64_t kAtOnce = 2048; // whole blocks, in the innermost cache
  alignas(64) std::byte between[kAtOnce * sizeof(float)];
  for (uint64_t at = 0; at < count; at += kAtOnce) {
    const uint64_t some = std::min(kAtOnce, count - at);
    read(between, source + at * itemBytes(change.read.stands), some, change, false);
    write(target + at * itemBytes(change.write.stands), between, some, change, stream);
  }
}

} // namespace

void changeRow(std::byte *target, const std::byte *source, uint64_t bytes, const Change &change, bool stream) {
  changeOne(target, source, bytes, change, stream);
  if (stream)
    finishStreaming();
}

void changeRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count,
                const Change &change, bool stream) {
  const Loop outer = innerLoop(shape, 1), inner = innerLoop(shape, 0);
  forBlocks(shape, first, count, [&](int64_t to, int64_t from, uint64_t steps, uint64_t rows) {
    for (uint64_t i = 0; i < steps; ++i)
      for (uint64_t k = 0; k < rows; ++k)
        changeOne(target + to + static_cast<int64_t>(i) * outer.targetStride +
                      static_cast<int64_t>(k) * inner.targetStride,
                  source ? source + from + static_cast<int64_t>(i) * outer.sourceStride +
                               static_cast<int64_t>(k) * inner.sourceStride
                         : nullptr,
                  shape.rowBytes, change, stream);
  });
  if (stream)
    finishStreaming();
}

} // namespace reshard::kernels
