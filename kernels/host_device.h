// Code that a GPU and the host run alike: a GPU each lane of a warp by itself, the host all lanes of one after the
// other, step by step. Tests run it so.
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

/// Threads of a warp, and of a block.
constexpr uint32_t kWarpThreads = 32, kBlockThreads = 256;

/// What a thread of the host, and of a GPU, has of a warp: values of lanes are arrays of so many, element i that of
/// lane `lane + i`.
#if defined(__CUDA_ARCH__)
constexpr uint32_t kLanesPerThread = 1;
#else
constexpr uint32_t kLanesPerThread = kWarpThreads;
#endif

/// Of each `group` lanes side by side, a power of two, the largest value, in all of them. All lanes of the warp come
/// here.
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

/// Makes a number in memory, at a multiple of 4, at least `value`; others may do so at the same time.
RESHARD_HOST_DEVICE inline void raiseTo(uint64_t address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  atomicMax(reinterpret_cast<unsigned *>(address), value);
#else
  uint32_t known;
  std::memcpy(&known, reinterpret_cast<const void *>(address), sizeof known);
  if (value > known)
    std::memcpy(reinterpret_cast<void *>(address), &value, sizeof value);
#endif
}

/// Quotients of what is mostly below 2^32, where a GPU divides much faster.
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
