// Launches a table of descriptors on a GPU.
#pragma once

#include "kernels/copy_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Enqueues all copies of a table in device memory as one kernel; `slots` may be 0. `blocks` from launchBlocks. When
/// the kernel begins, all that was enqueued before it is done, and `*progress`, in memory of the host that the device
/// sees, becomes `number`.
cudaError_t launchCopies(const CopyTableView &table, uint32_t blocks, volatile uint32_t *progress, uint32_t number,
                         cudaStream_t stream);

/// Blocks that keep the current device busy with so many slots.
cudaError_t launchBlocks(uint64_t slots, uint32_t &blocks);

} // namespace reshard::kernels
