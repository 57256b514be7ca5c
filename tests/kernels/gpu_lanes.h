// The kernels' code as a GPU compiles it (__CUDA_ARCH__), run on the host: the 32 lanes of a warp are coroutines that
// meet in shuffles, memory is read and written by what stands in for the GPU's instructions, and E4M3 comes from the
// host functions of CUDA's headers where these are. What it cannot tell is the GPU's own arithmetic.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::kernels {
struct ConversionTableView;
struct CopyTableView;
} // namespace reshard::kernels

namespace reshard::tests {

/// What all lanes of a warp do of changeWarp, and all threads of a block's warp of copyThread. An error text where
/// lanes part at a shuffle, or an access is not aligned; empty otherwise. Not under ThreadSanitizer, which does not
/// know of coroutines.
std::string convertWarpOfLanes(const kernels::ConversionTableView &view, uint32_t block, uint32_t blocks,
                               uint32_t warp);
std::string copyWarpOfLanes(const kernels::CopyTableView &view, uint32_t block, uint32_t blocks, uint32_t warp);

} // namespace reshard::tests
