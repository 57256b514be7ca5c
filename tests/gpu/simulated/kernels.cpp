// SPDX-License-Identifier: Apache-2.0
// Kernel launches: the registration and launch functions that nvcc's host code calls, which run the GPU code on the
// host.

#include "kernels/gpu/conversion_kernel.h"
#include "kernels/gpu/digest_kernel.h"
#include "tests/gpu/simulated/gpu.h"
#include "tests/kernels/gpu_lanes.h"

#include <algorithm>
#include <cstring>
#include <vector_types.h>

using namespace simulated;
using namespace reshard::kernels;

namespace {

std::map<const void *, std::string> &names() {
  static std::map<const void *, std::string> names; // mangled name, by the address of the host function
  return names;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

/// Calls `each` for each warp of each block once, in random order.
void inAnyOrder(uint32_t blocks, const std::function<std::string(uint32_t block, uint32_t warp)> &each) {
  std::vector<uint32_t> order(blocks * (kBlockThreads / kWarpThreads));
  for (uint32_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::shuffle(order.begin(), order.end(), Gpu::get().random);
  for (const uint32_t i : order)
    if (const std::string problem = each(i % blocks, i / blocks); !problem.empty())
      die("error in a kernel: " + problem);
}

} // namespace

extern "C" {

void **__cudaRegisterFatBinary(void *) {
  static void *handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *,
                            int *) {
  names()[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t *>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(host));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t,
                               cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (!stream)
    die("a kernel is launched on the null stream, which is not simulated");
  if (stream->device != currentDevice())
    return cudaErrorInvalidResourceHandle;
  const uint32_t blocks = grid.x;
  if (blocks == 0 || grid.y != 1 || grid.z != 1 || block.x != kBlockThreads || block.y != 1 || block.z != 1)
    return cudaErrorInvalidConfiguration;
  const std::string &name = names()[kernel];
  if (name.find("copyTable") != std::string::npos) {
    const auto table = *static_cast<const CopyTableView *>(arguments[0]);
    auto *progress = *static_cast<volatile uint32_t **>(arguments[1]);
    const auto number = *static_cast<const uint32_t *>(arguments[2]);
    return Gpu::get().enqueue(stream, atOnce([=] {
                                inAnyOrder(blocks, [&](uint32_t own, uint32_t warp) {
                                  if (own == 0 && warp == 0)
                                    *progress = number;
                                  return reshard::tests::copyWarpOfLanes(table, own, blocks, warp);
                                });
                              }));
  }
  if (name.find("convertTable") != std::string::npos) {
    const auto view = *static_cast<const ConversionTableView *>(arguments[0]);
    return Gpu::get().enqueue(stream, atOnce([=] {
                                inAnyOrder(blocks, [&](uint32_t own, uint32_t warp) {
                                  return reshard::tests::convertWarpOfLanes(view, own, blocks, warp);
                                });
                              }));
  }
  if (name.find("digestTable") != std::string::npos) {
    const auto view = *static_cast<const DigestTableView *>(arguments[0]);
    return Gpu::get().enqueue(stream, atOnce([=] {
                                inAnyOrder(blocks, [&](uint32_t own, uint32_t warp) {
                                  return reshard::tests::digestWarpOfLanes(view, own, blocks, warp);
                                });
                              }));
  }
  die("kernel '" + name + "' is not simulated");
}
}
