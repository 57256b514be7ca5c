// SPDX-License-Identifier: Apache-2.0
// Launches tables of copies, conversions and digests on a GPU. A table is in device memory, and one kernel runs all of
// it.
#pragma once

#include "kernels/gpu/conversion_kernel.h"
#include "kernels/gpu/copy_kernel.h"
#include "kernels/gpu/digest_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Resident blocks per multiprocessor; limited by the registers of a thread.
constexpr int kCopyBlocksEach = 3, kConversionBlocksEach = 3, kDigestBlocksEach = 2;

/// Computes the number of blocks that keeps the current device busy with this many slots. `each`: blocks that a
/// multiprocessor runs at a time.
cudaError_t launchBlocks(uint64_t slots, int each, uint32_t &blocks);

/// Enqueues all copies of a table; `slots` may be 0. `blocks` comes from launchBlocks. When the kernel starts, all work
/// enqueued before it is done; the kernel then writes `number` to `*progress`, which is host memory mapped into the
/// device.
cudaError_t launchCopies(const CopyTableView &table, uint32_t blocks, volatile uint32_t *progress, uint32_t number,
                         cudaStream_t stream);

/// Enqueues all conversions of a table, which must have at least one tile.
cudaError_t launchConversions(const ConversionTableView &view, cudaStream_t stream);

/// Enqueues all digests of a table. `blocks` comes from launchBlocks.
cudaError_t launchDigests(const DigestTableView &table, uint32_t blocks, cudaStream_t stream);

} // namespace reshard::kernels
