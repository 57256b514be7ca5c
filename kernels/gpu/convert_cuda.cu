// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu/launch.h"

namespace reshard::kernels {
namespace {

__global__ void __launch_bounds__(kBlockThreads, kConversionBlocksEach) convertTable(const ConversionTableView view) {
  convertWarp(view, blockIdx.x, gridDim.x, threadIdx.x / kWarpThreads, threadIdx.x % kWarpThreads);
}

} // namespace

cudaError_t launchConversions(const ConversionTableView &view, cudaStream_t stream) {
  uint32_t blocks = 0;
  if (const cudaError_t error = launchBlocks(view.tiles * uint64_t{kTileSlots}, kConversionBlocksEach, blocks);
      error != cudaSuccess)
    return error;
  convertTable<<<blocks, kBlockThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

} // namespace reshard::kernels
