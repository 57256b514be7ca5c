// Copies that change the order of elements, in tiles of whole cache lines on both sides.
#pragma once

#include "kernels/kernels.h"
#include "kernels/stream.h"

namespace reshard::kernels {

/// Returns whether the two innermost loops transpose: rows are elements of 1, 2, 4, 8 or 16 bytes, one loop is
/// contiguous in the source and the other is contiguous in the target.
bool transposes(const Strided &shape);

/// Copies a block of such a shape: its two innermost loops, with the counts of the block. With `stream` null, the
/// target is written with usual stores.

void transposeBlock(Level level, StreamLines stream, std::byte *target, const std::byte *source, uint64_t elementBytes,
                    const Loop &outer, const Loop &inner);

} // namespace reshard::kernels
