// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/gpu_lanes.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <ucontext.h>
#include <vector>
#ifdef RESHARD_CUDA_HEADERS
#include <cuda_fp8.h> // included before __CUDA_ARCH__ is defined, for its host functions
#include <vector_functions.h>
#else
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#endif

namespace {

/// The warp that runs. Its lanes run in turn: each until its next shuffle or its end.
class Warp {
public:
  static constexpr uint32_t kLanes = 32;

  std::string run(const std::function<void(uint32_t lane)> &lane) {
    lane_ = &lane;
    for (State &state : states_)
      state = {};
    problem_.clear();
    for (uint32_t l = 0; l < kLanes; ++l)
      begin(contexts_[l], stacks_[l]);
    for (uint32_t done = 0; done == 0;) {
      for (here_ = 0; here_ < kLanes; ++here_)
        swapcontext(&scheduler_, &contexts_[here_]);
      for (const State &state : states_) {
        done += state.done;
        if (!state.done && state.step != states_[0].step)
          fail("lanes shuffle with different steps");
      }
      if (done != 0 && done != kLanes) { // a GPU would hang, or read an undefined value
        fail("some lanes have ended while others wait in a shuffle");
        break;
      }
    }
    return problem_;
  }

  uint32_t shuffle(uint32_t mask, uint32_t value, uint32_t step) {
    if (mask != 0xFFFFFFFF || step == 0 || step >= kLanes)
      fail("shuffle: found mask " + std::to_string(mask) + " and step " + std::to_string(step) +
           ", expected all lanes and a step of 1 to 31");
    const uint32_t lane = here_;
    State &state = states_[lane];
    const size_t turn = state.shuffles++ % 2; // two buffers: a faster lane must not overwrite what others still read
    state.values[turn] = value;
    state.step = step;
    swapcontext(&contexts_[lane], &scheduler_);
    return states_[lane ^ step].values[turn];
  }

  void access(const void *address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
      fail("an access of " + std::to_string(bytes) + " bytes is not aligned to its size");
  }

private:
  static constexpr size_t kStackBytes = 64 << 10;
  struct State {
    bool done = false;
    uint32_t step = 0, shuffles = 0;
    uint32_t values[2] = {};
  };

  void begin(ucontext_t &context, std::vector<char> &stack) {
    getcontext(&context);
    stack.resize(kStackBytes);
    context.uc_stack.ss_sp = stack.data();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = &scheduler_;
    makecontext(&context, enter, 0);
  }
  static void enter();
  void fail(const std::string &text) { problem_ = problem_.empty() ? text : problem_; }

  const std::function<void(uint32_t)> *lane_ = nullptr;
  uint32_t here_ = 0;
  std::string problem_;
  ucontext_t scheduler_;
  std::array<State, kLanes> states_;
  std::array<ucontext_t, kLanes> contexts_;
  std::array<std::vector<char>, kLanes> stacks_;
};

Warp warp;

void Warp::enter() {
  const uint32_t lane = warp.here_;
  (*warp.lane_)(lane);
  warp.states_[lane].done = true;
}

// Replacements of GPU built-in functions.
uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int step) {
  return warp.shuffle(mask, value, static_cast<uint32_t>(step));
}
void atomicMax(unsigned *address, unsigned value) {
  warp.access(address, sizeof *address);
  *address = value > *address ? value : *address;
}
void atomicAdd(unsigned long long *address, unsigned long long value) {
  warp.access(address, sizeof *address);
  *address += value;
}
template <class T> T __ldcs(const T *address) {
  warp.access(address, sizeof(T));
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}
template <class T> void __stcs(T *address, T value) {
  warp.access(address, sizeof(T));
  std::memcpy(address, &value, sizeof value);
}

} // namespace

// The kernels' headers, compiled as for the GPU in a separate namespace.
#ifdef RESHARD_CUDA_HEADERS
#define __CUDA_ARCH__ 900
#else
#define __CUDA_ARCH__ 800
#endif
#define kernels kernels_on_gpu
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // arrays of one element, which are written before they are read

#include "kernels/gpu/conversion_kernel.h"
#include "kernels/gpu/digest_kernel.h"
#pragma GCC diagnostic pop
#undef kernels

namespace reshard::tests {

std::string convertWarpOfLanes(const kernels::ConversionTableView &view, uint32_t block, uint32_t blocks,
                               uint32_t number) {
  const auto &table = reinterpret_cast<const kernels_on_gpu::ConversionTableView &>(view);
  return warp.run([&](uint32_t lane) { kernels_on_gpu::convertWarp(table, block, blocks, number, lane); });
}

std::string copyWarpOfLanes(const kernels::CopyTableView &view, uint32_t block, uint32_t blocks, uint32_t number) {
  const auto &table = reinterpret_cast<const kernels_on_gpu::CopyTableView &>(view);
  return warp.run([&](uint32_t lane) {
    kernels_on_gpu::copyThread(table, block, blocks, number * kernels_on_gpu::kWarpThreads + lane);
  });
}

std::string digestWarpOfLanes(const kernels::DigestTableView &view, uint32_t block, uint32_t blocks, uint32_t number) {
  const auto &table = reinterpret_cast<const kernels_on_gpu::DigestTableView &>(view);
  return warp.run([&](uint32_t lane) {
    kernels_on_gpu::digestThread(table, block, blocks, number * kernels_on_gpu::kWarpThreads + lane);
  });
}

} // namespace reshard::tests
