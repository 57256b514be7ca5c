// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/divide_files.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

constexpr int64_t kLongRow = 1 << 20;

/// The last byte at or before `wanted` at which a cut may be.
int64_t cutBefore(int64_t wanted, int64_t rowBytes, int64_t granule) {
  const int64_t row = wanted / rowBytes * rowBytes;
  return rowBytes < kLongRow ? row : row + (wanted - row) / granule * granule;
}

} // namespace

void divideFiles(const std::vector<Descriptor> &descriptors, int64_t world, Interner<Shape> &shapes,
                 llvm::function_ref<int64_t(const Descriptor &)> granule, std::vector<LocalDescriptor> &local) {
  int64_t total = 0;
  for (const Descriptor &d : descriptors)
    total += bytesOf(shapes[d.shape]);
  // Without overflow: bytes times ranks may exceed 64 bits.
  const auto end = [&](int64_t rank) { return total / world * (rank + 1) + total % world * (rank + 1) / world; };
  DescriptorCutter cutter(shapes);
  std::vector<Descriptor> stack, taken;
  int64_t rank = 0, at = 0;
  for (const Descriptor &d : descriptors) {
    const int64_t bytes = bytesOf(shapes[d.shape]), rowBytes = shapes[d.shape].rowBytes;
    stack = {d};
    for (int64_t done = 0; done < bytes;) {
      while (rank + 1 < world && at + done >= end(rank))
        ++rank;
      const int64_t next = rank + 1 == world ? bytes : std::min(bytes, cutBefore(end(rank) - at, rowBytes, granule(d)));
      if (next <= done) { // less than a row is left of what the rank copies
        ++rank;
        continue;
      }
      taken.clear();
      cutter.take(stack, next - done, taken);
      for (const Descriptor &part : taken)
        local.push_back({part, static_cast<int32_t>(rank)});
      done = next;
    }
    at += bytes;
  }
}

} // namespace reshard
