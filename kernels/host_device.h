// SPDX-License-Identifier: Apache-2.0
// Primitives for code that runs on a GPU and on the host. A GPU thread runs one lane of a warp; the host runs all lanes
// of a warp in lockstep, so tests can run the GPU code without a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define RESHARD_HOST_DEVICE __host__ __device__
#define RESHARD_UNROLL _Pragma("unroll")
#define RESHARD_NO_UNROLL _Pragma("unroll 1")
#else
#define RESHARD_HOST_DEVICE
#define RESHARD_UNROLL
#define RESHARD_NO_UNROLL
#endif

namespace reshard::kernels {

/// Threads of a warp, and threads of a block.
constexpr uint32_t kWarpThreads = 32, kBlockThreads = 256;

/// Lanes that one thread runs: 1 on a GPU, a whole warp on the host. Values of lanes are arrays of this size; element i
/// belongs to lane `lane + i`.
#if defined(__CUDA_ARCH__)
constexpr uint32_t kLanesPerThread = 1;
#else
constexpr uint32_t kLanesPerThread = kWarpThreads;
#endif

/// Replaces each value by the maximum over its group of `group` adjacent lanes; `group` is a power of two. All lanes of
/// the warp must call this together.
RESHARD_HOST_DEVICE inline void groupMax(uint32_t (&values)[kLanesPerThread], uint32_t group) {
#if defined(__CUDA_ARCH__)
  RESHARD_NO_UNROLL
  for (uint32_t step = 1; step < group; step *= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, values[0], static_cast<int>(step));
    values[0] = values[0] > other ? values[0] : other;
  }
#else
  for (uint32_t first = 0; first < kLanesPerThread; first += group) {
    uint32_t max = 0;
    for (uint32_t i = first; i < first + group; ++i)
      max = values[i] > max ? values[i] : max;
    for (uint32_t i = first; i < first + group; ++i)
      values[i] = max;
  }
#endif
}

/// A pointer to the address, which the records that kernels read state as an integer.
template <class T> RESHARD_HOST_DEVICE inline T *pointerTo(uint64_t address) {
  return reinterpret_cast<T *>(address); // NOLINT(performance-no-int-to-ptr): there is no pointer to start from
}

/// Atomic max: raises the uint32 at `address` (a multiple of 4) to at least `value`.
RESHARD_HOST_DEVICE inline void raiseTo(uint64_t address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  atomicMax(pointerTo<unsigned>(address), value);
#else
  uint32_t known;
  std::memcpy(&known, pointerTo<const void>(address), sizeof known);
  if (value > known)
    std::memcpy(pointerTo<void>(address), &value, sizeof value);
#endif
}

/// Atomic addition modulo 2^64.
RESHARD_HOST_DEVICE inline void addTo(uint64_t *sum, uint64_t value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long *>(sum), static_cast<unsigned long long>(value));
#else
  *sum += value;
#endif
}

/// Returns a / b. Uses 32-bit division if both fit, which is much faster on a GPU.
RESHARD_HOST_DEVICE inline uint64_t quotient(uint64_t a, uint64_t b) {
  return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

template <class To, class From> RESHARD_HOST_DEVICE inline To bitCast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

} // namespace reshard::kernels
