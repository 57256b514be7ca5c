// SPDX-License-Identifier: Apache-2.0
// Copies and fills of strided bytes on the CPU.
#pragma once

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

/// Writes zeros to the target side of rows [first, first + count).
void fillRows(std::byte *target, const Strided &shape, uint64_t first, uint64_t count);

} // namespace reshard::kernels
