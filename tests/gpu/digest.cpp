// SPDX-License-Identifier: Apache-2.0
// Digests of a GPU's memory, compared with those that the CPU computes of the same bytes.

#include "kernels/cpu/tensor_digest.h"
#include "tests/gpu/plan_on_gpu.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace reshard::gpu {

namespace {

/// The digests of each binding: of all its bytes, and of elements of 2 bytes that lie every 6 bytes.
std::vector<uint64_t> onCpu(const PlanOnGpu &plan) {
  std::vector<uint64_t> sums;
  for (const PlanOnGpu::Binding &binding : plan.bindings())
    for (const bool strided : {false, true}) {
      kernels::TensorDigest digest;
      if (strided)
        digest.add(binding.host, 2, 6, 3, binding.bytes / 6);
      else
        digest.add(binding.host, 1, 1, 0, binding.bytes);
      sums.insert(sums.end(), digest.sums.begin(), digest.sums.end());
    }
  return sums;
}

kernels::DigestTable tableOf(const PlanOnGpu &plan) {
  kernels::DigestTable table;
  uint32_t number = 0;
  for (const PlanOnGpu::Binding &binding : plan.bindings())
    for (const bool strided : {false, true}) {
      kernels::Strided shape;
      shape.rowBytes = strided ? 2 : binding.bytes;
      shape.loopCount = strided;
      shape.loops[0] = {binding.bytes / 6, 6, 2};
      if (shape.bytes() > 0)
        table.add(number, strided ? 6 : 0, reinterpret_cast<uint64_t>(binding.onDevice), shape);
      ++number;
    }
  return table;
}

} // namespace

void testDigests(const std::string &path) {
  PlanOnGpu plan(path, "threads");
  const kernels::DigestTable table = tableOf(plan);
  for (const uint64_t seed : {1, 2}) {
    plan.fill(seed);
    const std::vector<uint64_t> expected = onCpu(plan);
    std::vector<uint64_t> found(expected.size());
    need(plan.device().digest(table, found));
    if (found != expected || std::count(found.begin(), found.end(), 0) == static_cast<ptrdiff_t>(found.size()))
      throw std::runtime_error("the device's digests differ from those of the host");
  }
  std::printf("  digests of %zu blocks of memory equal those of the host\n", plan.bindings().size());
}

} // namespace reshard::gpu
