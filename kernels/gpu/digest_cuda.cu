// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu/launch.h"

namespace reshard::kernels {
namespace {

__global__ void __launch_bounds__(kBlockThreads, kDigestBlocksEach) digestTable(const DigestTableView table) {
  digestThread(table, blockIdx.x, gridDim.x, threadIdx.x);
}

} // namespace

cudaError_t launchDigests(const DigestTableView &table, uint32_t blocks, cudaStream_t stream) {
  digestTable<<<blocks, kBlockThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

} // namespace reshard::kernels
