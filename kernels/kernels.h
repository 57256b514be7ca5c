// SPDX-License-Identifier: Apache-2.0
// Strided bytes, the iteration over their rows, and copies and fills of them on the CPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace reshard::kernels {

/// Maximum number of loops in a plan's shapes, plus one.
constexpr size_t kMaxLoops = 17;

/// One loop around rows. Strides are in bytes and may be negative.
struct Loop {
  uint64_t count;
  int64_t sourceStride, targetStride;
};

/// A strided set of bytes. `loops[0]` is the outermost loop; the innermost contains a row of rowBytes contiguous bytes
/// on both sides.
struct Strided {
  uint64_t rowBytes = 0;
  size_t loopCount = 0;
  Loop loops[kMaxLoops];
  uint64_t rows() const;
  uint64_t bytes() const { return rows() * rowBytes; }
};

/// Rewrites a shape to fewer, longer loops over the same bytes: removes loops of one iteration, merges loops that
/// continue each other, and joins rows that are adjacent on both sides.
void simplify(Strided &shape);

/// Returns the number of rows to copy at a time to reach about `bytes`. It is larger if the two innermost loops
/// transpose elements, because a fast transpose needs whole cache lines in both loops.
uint64_t chunkRows(const Strided &shape, uint64_t bytes);

/// Rows [first, first + count) of a shape, numbered with the innermost loop fastest. `target` and `source` are the
/// addresses of row 0.
struct StridedRows {
  std::byte *target;
  const std::byte *source;
  const Strided &shape;
  uint64_t first, count;
};

/// Copies rows. Source and target must not overlap. `stream`: writes whole cache lines with non-temporal stores where
/// the CPU supports them, which is faster if much more than the cache size is moved.
void copyRows(const StridedRows &rows, bool stream = false);

enum class CpuLevel; // cpu/streaming_stores.h
/// As copyRows, with the instructions of a level that is not above cpuLevel().
void copyRowsAt(CpuLevel level, const StridedRows &rows, bool stream);

/// Writes zeros to the target side of rows [first, first + count).
void fillRows(std::byte *target, const Strided &shape, uint64_t first, uint64_t count);

/// Returns the loop `depth` loops outside the innermost (0: the innermost), or a loop of one iteration if there is
/// none.
inline Loop innerLoop(const Strided &shape, size_t depth) {
  return depth < shape.loopCount ? shape.loops[shape.loopCount - 1 - depth] : Loop{1, 0, 0};
}

/// Iterates over rows [first, first + count) in blocks of the two innermost loops: visit(target offset, source offset,
/// steps of the outer loop, rows of the inner loop). A block that begins or ends within the inner loop has one step.
template <class Visit> void forBlocks(const Strided &shape, uint64_t first, uint64_t count, Visit visit) {
  const Loop outer = innerLoop(shape, 1), inner = innerLoop(shape, 0);
  const size_t outside = std::max<size_t>(shape.loopCount, 2) - 2; // loops around the two
  uint64_t innerAt = first % inner.count, outerAt = first / inner.count % outer.count, at[kMaxLoops];
  int64_t target = 0, source = 0;
  uint64_t rest = first / inner.count / outer.count;
  for (size_t l = outside; l-- > 0; rest /= shape.loops[l].count) {
    at[l] = rest % shape.loops[l].count;
    target += static_cast<int64_t>(at[l]) * shape.loops[l].targetStride;
    source += static_cast<int64_t>(at[l]) * shape.loops[l].sourceStride;
  }
  while (count > 0) {
    const uint64_t steps =
        innerAt > 0 || count < inner.count ? 1 : std::min(count / inner.count, outer.count - outerAt);
    const uint64_t rows = steps > 1 ? inner.count : std::min(count, inner.count - innerAt);
    visit(target + static_cast<int64_t>(outerAt) * outer.targetStride +
              static_cast<int64_t>(innerAt) * inner.targetStride,
          source + static_cast<int64_t>(outerAt) * outer.sourceStride +
              static_cast<int64_t>(innerAt) * inner.sourceStride,
          steps, rows);
    count -= steps * rows;
    innerAt += rows;
    if (innerAt < inner.count)
      continue;
    innerAt = 0;
    outerAt += steps;
    if (outerAt < outer.count)
      continue;
    outerAt = 0;
    for (size_t l = outside; l-- > 0;) {
      target += shape.loops[l].targetStride;
      source += shape.loops[l].sourceStride;
      if (++at[l] < shape.loops[l].count)
        break;
      target -= static_cast<int64_t>(at[l]) * shape.loops[l].targetStride;
      source -= static_cast<int64_t>(at[l]) * shape.loops[l].sourceStride;
      at[l] = 0;
    }
  }
}

/// Splits a shape in two halves of its outermost loop, or of its row, between units, if it has no loop; and bytes
/// [first, first + bytes) accordingly: visit(half, bytes of the row before it, iterations of the outermost loop before
/// it, first, bytes).
template <class Visit>
void forHalves(const Strided &shape, uint64_t unit, uint64_t first, uint64_t bytes, Visit visit) {
  const bool row = shape.loopCount == 0;
  const uint64_t count = row ? shape.rowBytes / unit : shape.loops[0].count, lower = count / 2;
  const uint64_t cut = row ? lower * unit : shape.bytes() / count * lower;
  for (const bool upper : {false, true}) {
    const uint64_t begin = upper ? std::max(first, cut) : first,
                   end = upper ? first + bytes : std::min(first + bytes, cut);
    Strided half = shape;
    if (row) {
      half.rowBytes = upper ? shape.rowBytes - cut : cut;
    } else if (half.loops[0].count = upper ? count - lower : lower; half.loops[0].count == 1) {
      std::copy(half.loops + 1, half.loops + half.loopCount, half.loops); // remove the loop of one iteration
      --half.loopCount;
    }
    if (begin < end)
      visit(half, static_cast<int64_t>(row && upper ? cut : 0), static_cast<int64_t>(!row && upper ? lower : 0),
            begin - (upper ? cut : 0), end - begin);
  }
}

} // namespace reshard::kernels
