// SPDX-License-Identifier: Apache-2.0
// The GPU code of the kernels (__CUDA_ARCH__), run on the host. The 32 lanes of a warp are coroutines that synchronize
// in shuffles; host functions replace the GPU's memory instructions; E4M3 conversion uses the host functions of CUDA's
// headers if they are available. This does not test the arithmetic of a real GPU.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::kernels {
struct ConversionTableView;
struct CopyTableView;
struct DigestTableView;
} // namespace reshard::kernels

namespace reshard::tests {

/// Runs all lanes of a warp of convertWarp, and all threads of a block's warp of copyThread and of digestThread.
/// Returns an error text if lanes diverge at a shuffle or an access is not aligned, else an empty string. Cannot run
/// under ThreadSanitizer, which does not support coroutines.
std::string convertWarpOfLanes(const kernels::ConversionTableView &view, uint32_t block, uint32_t blocks,
                               uint32_t warp);
std::string copyWarpOfLanes(const kernels::CopyTableView &view, uint32_t block, uint32_t blocks, uint32_t warp);
std::string digestWarpOfLanes(const kernels::DigestTableView &view, uint32_t block, uint32_t blocks, uint32_t warp);

} // namespace reshard::tests
