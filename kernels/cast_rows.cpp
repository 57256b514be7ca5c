#include "kernels/cast_rows.h"

#include "kernels/convert.h"
#include "kernels/strided.h"

namespace reshard::kernels {

void castRow(std::byte *target, const std::byte *source, uint64_t bytes, const Cast &change, bool stream) {
  cast(change.to, target, change.from, source, bytes / itemBytes(change.from), Overflow::saturate, {stream});
}

void castRows(std::byte *target, const std::byte *source, const Strided &shape, uint64_t first, uint64_t count, const Cast &change, bool stream) {
  const Loop outer = innerLoop(shape, 1), inner = innerLoop(shape, 0);
  forBlocks(shape, first, count, [&](int64_t to, int64_t from, uint64_t steps, uint64_t rows) {
    for (uint64_t i = 0; i < steps; ++i)
      for (uint64_t k = 0; k < rows; ++k)
        castRow(target + to + static_cast<int64_t>(i) * outer.targetStride + static_cast<int64_t>(k) * inner.targetStride,
                source + from + static_cast<int64_t>(i) * outer.sourceStride + static_cast<int64_t>(k) * inner.sourceStride, shape.rowBytes, change, stream);
  });
}

} // namespace reshard::kernels
