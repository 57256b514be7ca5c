// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu/convert_cuda.h"

#include <algorithm>

namespace reshard::kernels {
namespace {

/// Resident blocks per multiprocessor; limited by the registers of a thread.
constexpr int kBlocksEach = 3;

__global__ void __launch_bounds__(kBlockThreads, kBlocksEach) convertTable(const ConversionTableView view) {
  convertWarp(view, blockIdx.x, gridDim.x, threadIdx.x / kWarpThreads, threadIdx.x % kWarpThreads);
}

} // namespace

cudaError_t launchConversions(const ConversionTableView &view, cudaStream_t stream) {
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  const uint64_t warps = kBlockThreads / kWarpThreads;
  const auto blocks = static_cast<uint32_t>(
      std::min<uint64_t>((view.tiles + warps - 1) / warps, static_cast<uint64_t>(processors) * kBlocksEach));
  convertTable<<<blocks, kBlockThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

} // namespace reshard::kernels
