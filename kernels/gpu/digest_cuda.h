// SPDX-License-Identifier: Apache-2.0
// Launches a table of digests on a GPU.
#pragma once

#include "kernels/gpu/digest_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Resident blocks of digests per multiprocessor; limited by the registers of a thread.
constexpr int kDigestBlocksEach = 2;

/// Enqueues all digests of a table in device memory as one kernel. `blocks` comes from launchBlocks (copy_cuda.h).
cudaError_t launchDigests(const DigestTableView &table, uint32_t blocks, cudaStream_t stream);

} // namespace reshard::kernels
