// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu/launch.h"

#include <algorithm>

namespace reshard::kernels {
namespace {

__global__ void __launch_bounds__(kBlockThreads, kCopyBlocksEach)
    copyTable(const CopyTableView table, volatile uint32_t *progress, uint32_t number) {
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *progress = number;
  copyThread(table, blockIdx.x, gridDim.x, threadIdx.x);
}

} // namespace

cudaError_t launchCopies(const CopyTableView &table, uint32_t blocks, volatile uint32_t *progress, uint32_t number,
                         cudaStream_t stream) {
  copyTable<<<blocks, kBlockThreads, 0, stream>>>(table, progress, number);
  return cudaGetLastError();
}

cudaError_t launchBlocks(uint64_t slots, int each, uint32_t &blocks) {
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  const uint64_t blockSlots = kBlockThreads / kWarpThreads * kTileSlots;
  blocks = static_cast<uint32_t>(
      std::clamp<uint64_t>((slots + blockSlots - 1) / blockSlots, 1, static_cast<uint64_t>(processors) * each));
  return cudaSuccess;
}

} // namespace reshard::kernels
