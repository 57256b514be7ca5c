// Elements whose order differs from side to side: tiles of whole lines of both.
#pragma once

#include "kernels/kernels.h"
#include "kernels/stream.h"

namespace reshard::kernels {

/// Whether a shape's rows are elements of 1, 2, 4, 8 or 16 bytes and its two innermost loops transpose them: one loop
/// walks the source element by element, the other one the target.
bool transposes(const Strided &shape);

/// Copies a block of such a shape: its two loops with the block's counts. `stream` null: the target's lines are stored
/// the usual way.
void transposeBlock(Level level, StreamLines stream, std::byte *target, const std::byte *source, uint64_t elementBytes,
                    const Loop &outer, const Loop &inner);

} // namespace reshard::kernels
