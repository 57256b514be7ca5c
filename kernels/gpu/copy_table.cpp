// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu/copy_table.h"

#include "kernels/kernels.h"

#include <algorithm>

namespace reshard::kernels {

namespace {

/// Rows shorter than this are not split into three entries.
constexpr uint64_t kCutRowBytes = 256;

/// Returns the largest power of two, at most kSlotBytes, that divides all the numbers that were ORed into `bits`.
uint64_t alignment(uint64_t bits) { return std::min<uint64_t>(kSlotBytes, bits == 0 ? kSlotBytes : bits & -bits); }

uint64_t strideBits(const Strided &shape, bool fill) {
  uint64_t bits = 0;
  for (size_t l = 0; l < shape.loopCount; ++l)
    bits |= static_cast<uint64_t>(shape.loops[l].targetStride) |
            (fill ? 0 : static_cast<uint64_t>(shape.loops[l].sourceStride));
  return bits;
}

} // namespace

/// Splits long rows whose two sides have the same misalignment into the bytes before the first aligned boundary, the
/// aligned middle, and the bytes after the last boundary.
void CopyTable::add(uint64_t target, uint64_t source, const Strided &given, uint64_t first, uint64_t bytes) {
  Strided shape = given;
  simplify(shape);
  if (shape.loopCount == 0) {
    target += first;
    source += source ? first : 0;
    shape.rowBytes = bytes;
    first = 0;
  }
  const uint64_t between = alignment(strideBits(shape, source == 0) | (source ? source - target : 0));
  const bool whole = first == 0 && bytes == shape.bytes();
  if (!whole || between < kSlotBytes || shape.rowBytes < kCutRowBytes ||
      (target % kSlotBytes == 0 && shape.rowBytes % kSlotBytes == 0))
    return addAligned(target, source, shape, first, bytes);
  const uint64_t head = (kSlotBytes - target % kSlotBytes) % kSlotBytes, tail = (target + shape.rowBytes) % kSlotBytes;
  const uint64_t cuts[] = {0, head, shape.rowBytes - tail, shape.rowBytes};
  for (int c = 0; c < 3; ++c)
    if (Strided part = shape; cuts[c] < cuts[c + 1]) {
      part.rowBytes = cuts[c + 1] - cuts[c];
      addAligned(target + cuts[c], source ? source + cuts[c] : 0, part, 0, part.bytes());
    }
}

void CopyTable::addAligned(uint64_t target, uint64_t source, const Strided &shape, uint64_t first, uint64_t bytes) {
  if (bytes == 0)
    return;
  const uint64_t width = alignment(target | source | shape.rowBytes | first | bytes | strideBits(shape, source == 0));
  if (shape.bytes() / width >= maxUnits_)
    return forHalves(shape, width, first, bytes,
                     [&](const Strided &half, int64_t rowBytes, int64_t steps, uint64_t begin, uint64_t some) {
                       const Loop outer = steps > 0 ? shape.loops[0] : Loop{1, 0, 0};
                       addAligned(target + static_cast<uint64_t>(rowBytes + steps * outer.targetStride),
                                  source ? source + static_cast<uint64_t>(rowBytes + steps * outer.sourceStride) : 0,
                                  half, begin, some);
                     });
  const uint32_t number = shapeNumber(shapes_, loops_, shape, shape.rowBytes / width);
  CopyEntry &entry = entries_.back();
  entry = {source,
           target,
           entry.slot,
           static_cast<uint32_t>(first / width),
           static_cast<uint32_t>(bytes / width),
           number,
           static_cast<uint32_t>(width)};
  const uint64_t next = entry.slot + (bytes + kSlotBytes - 1) / kSlotBytes;
  entries_.push_back({0, 0, next, 0, 0, 0, 0});
  bytes_ += bytes;
}

uint32_t shapeNumber(std::vector<TableShape> &shapes, std::vector<TableLoop> &loops, const Strided &shape,
                     uint64_t units) {
  const auto rowUnits = static_cast<uint32_t>(units);
  auto same = [&](const TableShape &other) {
    if (other.rowUnits != rowUnits || other.loopCount != shape.loopCount)
      return false;
    for (uint32_t l = 0; l < other.loopCount; ++l)
      if (const TableLoop &loop = loops[other.firstLoop + l]; loop.count != shape.loops[l].count ||
                                                              loop.sourceStride != shape.loops[l].sourceStride ||
                                                              loop.targetStride != shape.loops[l].targetStride)
        return false;
    return true;
  };
  if (shapes.empty() || !same(shapes.back())) {
    shapes.push_back({rowUnits, static_cast<uint32_t>(loops.size()), static_cast<uint32_t>(shape.loopCount)});
    for (size_t l = 0; l < shape.loopCount; ++l)
      loops.push_back(
          {shape.loops[l].sourceStride, shape.loops[l].targetStride, static_cast<uint32_t>(shape.loops[l].count), 0});
  }
  return static_cast<uint32_t>(shapes.size() - 1);
}

} // namespace reshard::kernels
