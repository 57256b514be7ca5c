// SPDX-License-Identifier: Apache-2.0
#include "kernels/kernels.h"

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

} // namespace reshard::kernels
