// copyRows at a level of the caller's choice, for tests and benchmarks.
#pragma once

#include "kernels/kernels.h"
#include "kernels/stream.h"

namespace reshard::kernels {

/// As copyRows, with what `level` has; `level` must not be above cpuLevel().
void copyRowsAt(Level level, std::byte *target, const std::byte *source, const Strided &shape, uint64_t first,
                uint64_t count, bool stream);

} // namespace reshard::kernels
