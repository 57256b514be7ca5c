// SPDX-License-Identifier: Apache-2.0
// Launches a table of strided copies on a GPU.
#pragma once

#include "kernels/gpu/copy_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Enqueues all copies of a table in device memory as one kernel; `slots` may be 0. `blocks` comes from launchBlocks.
/// When the kernel starts, all work enqueued before it is done; the kernel then writes `number` to `*progress`, which
/// is host memory mapped into the device.
cudaError_t launchCopies(const CopyTableView &table, uint32_t blocks, volatile uint32_t *progress, uint32_t number,
                         cudaStream_t stream);

/// Resident blocks of copies per multiprocessor; limited by the registers of a thread.
constexpr int kCopyBlocksEach = 3;

/// Computes the number of blocks that keeps the current device busy with this many slots. `each`: blocks that a
/// multiprocessor runs at a time.
cudaError_t launchBlocks(uint64_t slots, int each, uint32_t &blocks);

} // namespace reshard::kernels
