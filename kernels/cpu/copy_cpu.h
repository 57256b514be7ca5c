// SPDX-License-Identifier: Apache-2.0
// copyRows at a CPU level that the caller chooses, for tests and benchmarks.
#pragma once

#include "kernels/cpu/streaming_stores.h"
#include "kernels/kernels.h"

namespace reshard::kernels {

/// As copyRows, with the instructions of `level`, which must not be above cpuLevel().
void copyRowsAt(CpuLevel level, const StridedRows &rows, bool stream);

} // namespace reshard::kernels
