// SPDX-License-Identifier: Apache-2.0
// Copies that change the order of elements, in tiles of whole cache lines on both sides.
#pragma once

#include "kernels/cpu/streaming_stores.h"
#include "kernels/kernels.h"

namespace reshard::kernels {

/// Returns whether the two innermost loops transpose: rows are elements of 1, 2, 4, 8 or 16 bytes, one loop is
/// contiguous in the source and the other is contiguous in the target.
bool transposes(const Strided &shape);

/// A block of such a shape: its two innermost loops, with the counts of the block.
struct TransposedBlock {
  std::byte *target;
  const std::byte *source;
  uint64_t elementBytes;
  Loop outer, inner;
};

/// Copies a block. With `stream` null, the target is written with usual stores.
void transposeBlock(CpuLevel level, StreamLines stream, const TransposedBlock &block);

} // namespace reshard::kernels
