// Copies and fills of strided bytes on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reshard::kernels {

/// The most loops of a plan's shapes, and one more.
constexpr size_t kMaxLoops = 17;

/// One loop around rows; strides in bytes, may be negative.
struct Loop {
  uint64_t count;
  int64_t sourceStride, targetStride;
};

/// `loops[0]` is the outermost; inside the innermost lies a row of rowBytes contiguous bytes on both sides.
struct Strided {
  uint64_t rowBytes = 0;
  size_t loopCount = 0;
  Loop loops[kMaxLoops];
  uint64_t rows() const;
  uint64_t bytes() const { return rows() * rowBytes; }
};

/// The same bytes with fewer, longer loops: loops of one step vanish, loops that continue one another join, rows that
/// touch on both sides grow.
void simplify(Strided &shape);

/// Rows to copy at a time so that it is about `bytes`: more where the two innermost loops transpose elements, since
/// those are copied well only where both loops fill lines of the cache.
uint64_t chunkRows(const Strided &shape, uint64_t bytes);

/// Copies rows [first, first + count) of a shape (numbered with the innermost loop fastest). Source and target must not
/// overlap. `stream`: whole lines by-pass the cache on their way out where the CPU can, which pays where much more than
/// the cache holds is moved.
void copyRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count,
              bool stream = false);

/// Zeros to the target side of rows [first, first + count).
void fillRows(std::byte *target, const Strided &shape, uint64_t first, uint64_t count);

} // namespace reshard::kernels
