// SPDX-License-Identifier: Apache-2.0
// Interaction of CUDA graphs: a caller's graph that reads the targets, work of a caller's hook in the refit's graph,
// and refits in a caller's graph.

#include "tests/gpu/plan_on_gpu.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace reshard::gpu {

namespace {

void need(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(cudaGetErrorString(error));
}

/// Copies of the targets, made by the device.
struct Copies {
  std::vector<std::byte *> of; // by binding; null if it is not a target
  explicit Copies(PlanOnGpu &plan) {
    for (const PlanOnGpu::Binding &binding : plan.bindings()) {
      of.push_back(nullptr);
      if (binding.endpoint > 0)
        of.back() = gpu::need(plan.device().allocate(binding.bytes + 1));
    }
  }
  void enqueue(const PlanOnGpu &plan, cudaStream_t stream) const {
    for (size_t p = 0; p < of.size(); ++p)
      if (of[p])
        need(cudaMemcpyAsync(of[p], plan.bindings()[p].onDevice, plan.bindings()[p].bytes, cudaMemcpyDeviceToDevice,
                             stream));
  }
  /// Checks the copies instead of the targets; returns the number of wrong elements.
  uint64_t mismatches(PlanOnGpu &plan, uint64_t seed) const {
    for (size_t p = 0; p < of.size(); ++p)
      if (of[p])
        gpu::need(plan.device().copy(plan.bindings()[p].host, of[p], plan.bindings()[p].bytes));
    uint64_t checked = 0;
    const uint64_t wrong = plan.mismatchesOnHost(seed, checked);
    return checked > 0 ? wrong : throw std::runtime_error("nothing was checked");
  }
};

int answer(void *, const char *, uint32_t) { return 0; }

} // namespace

/// A consumer's graph reads the targets by their addresses. It is captured once and must see the values of each refit.
void testConsumer(const std::string &path) {
  PlanOnGpu plan(path, "threads");
  plan.setHook(answer, nullptr);
  const Copies copies(plan);
  cudaStream_t stream = nullptr;
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  copies.enqueue(plan, stream);
  need(cudaStreamEndCapture(stream, &captured));
  need(cudaGraphInstantiate(&graph, captured, 0));
  plan.prepare();
  for (const uint64_t seed : {1, 2, 3}) {
    plan.fill(seed);
    plan.run();
    need(cudaGraphLaunch(graph, stream));
    need(cudaStreamSynchronize(stream));
    if (const uint64_t wrong = copies.mismatches(plan, seed); wrong > 0)
      throw std::runtime_error("the consumer's graph read " + std::to_string(wrong) + " wrong elements after refit " +
                               std::to_string(seed));
  }
  need(cudaGraphExecDestroy(graph));
  need(cudaGraphDestroy(captured));
  need(cudaStreamDestroy(stream));
  std::printf("  a consumer's graph reads the values of three refits\n");
}

/// Work that a hook enqueues while the refit is captured must run in every refit, after its last byte.
void testRefresh(const std::string &path) {
  PlanOnGpu plan(path, "threads");
  struct Hook {
    const PlanOnGpu &plan;
    const Copies copies;
    int calls = 0;
  } hook{plan, Copies(plan), 0};
  plan.setHook(
      [](void *user, const char *, uint32_t) {
        Hook &self = *static_cast<Hook *>(user);
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        const auto stream = static_cast<cudaStream_t>(reshard_stream(self.plan.executor()));
        if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusActive)
          return 1;
        if (self.calls++ == 0)
          self.copies.enqueue(self.plan, stream);
        return 0;
      },
      &hook);
  plan.prepare();
  if (hook.calls != 2)
    throw std::runtime_error("the hook was called " + std::to_string(hook.calls) +
                             " times in prepare, expected once for each of two ranks");
  for (const uint64_t seed : {1, 2, 3}) {
    plan.fill(seed);
    plan.run();
    if (const uint64_t wrong = hook.copies.mismatches(plan, seed); wrong > 0)
      throw std::runtime_error("the work of the hook read " + std::to_string(wrong) + " wrong elements after refit " +
                               std::to_string(seed));
  }
  if (hook.calls != 2)
    throw std::runtime_error("the hook was called " + std::to_string(hook.calls - 2) +
                             " times in runs, expected only the calls in prepare");
  std::printf("  work that a hook enqueues is part of three refits\n");
}

/// A refit on a caller's stream, and as a part of a caller's graph: work enqueued after it must see its values.
void testEnqueue(const std::string &path) {
  PlanOnGpu plan(path, "threads");
  plan.setHook(answer, nullptr);
  plan.prepare();
  const Copies copies(plan);
  cudaStream_t stream = nullptr;
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  auto enqueue = [&] {
    if (reshard_enqueue(plan.executor(), stream) != RESHARD_OK)
      throw std::runtime_error(reshard_error(plan.executor()));
    copies.enqueue(plan, stream);
  };
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  need(cudaStreamEndCapture(stream, &captured));
  need(cudaGraphInstantiate(&graph, captured, 0));
  for (const uint64_t seed : {1, 2, 3, 4}) {
    plan.fill(seed);
    if (seed % 2 == 0)
      enqueue();
    else
      need(cudaGraphLaunch(graph, stream));
    need(cudaStreamSynchronize(stream));
    if (const uint64_t wrong = copies.mismatches(plan, seed); wrong > 0)
      throw std::runtime_error("work enqueued after refit " + std::to_string(seed) + " read " + std::to_string(wrong) +
                               " wrong elements");
  }
  need(cudaGraphExecDestroy(graph));
  need(cudaGraphDestroy(captured));
  need(cudaStreamDestroy(stream));
  std::printf("  work after refits on a caller's stream and in a caller's graph reads their values\n");
}

namespace {

/// Binds all params to memory of `allocate` and returns the error of prepare. The memory is never written.
std::string refusal(const std::string &path, const std::function<std::byte *(size_t)> &allocate) {
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.device = "cuda";
  reshard_executor *executor = nullptr;
  if (reshard_open(path.c_str(), nullptr, 0, &options, &executor) != RESHARD_OK)
    throw std::runtime_error(reshard_error(executor));
  std::unique_ptr<Plan> opened;
  gpu::need(Plan::open(path, opened));
  for (uint32_t e = 0; e < opened->manifest().endpoints()->size(); ++e) {
    const schema::Endpoint &endpoint = *opened->manifest().endpoints()->Get(e);
    for (uint32_t p = 0; p < endpoint.ranks()->size(); ++p)
      for (uint32_t number = 0; number < endpoint.params()->size(); ++number)
        for (const schema::ParamInstance &instance : schema::instances(opened->manifest(), endpoint, number, p))
          reshard_bind(executor, e, endpoint.ranks()->Get(p), instance.name.c_str(),
                       allocate(static_cast<size_t>(instance.bytes)), static_cast<uint64_t>(instance.bytes));
  }
  reshard_set_hook(executor, "derive", answer, nullptr);
  const reshard_status status = reshard_prepare(executor);
  const std::string error = reshard_error(executor);
  reshard_close(executor);
  return status == RESHARD_BAD_BINDING ? error : "status " + std::to_string(status) + ": " + error;
}

} // namespace

/// Memory that is not on the device must be rejected before any byte moves.
void testRefusals(const std::string &path) {
  std::vector<std::unique_ptr<std::byte[]>> ofHost;
  std::string error =
      refusal(path, [&](size_t bytes) { return ofHost.emplace_back(std::make_unique<std::byte[]>(bytes)).get(); });
  if (error != "source rank 0 param 'a': found host memory, expected memory of device 0")
    throw std::runtime_error("prepare did not reject host memory: " + error);
  std::printf("  host memory is rejected: %s\n", error.c_str());
  int devices = 0;
  need(cudaGetDeviceCount(&devices));
  if (devices < 2)
    return;
  const std::unique_ptr<Device> other = gpu::need(openDevice("cuda", 1));
  error = refusal(path, [&](size_t bytes) { return gpu::need(other->allocate(bytes)); });
  if (error != "source rank 0 param 'a': found memory of device 1, expected memory of device 0")
    throw std::runtime_error("prepare did not reject memory of another device: " + error);
  std::printf("  memory of another device is rejected: %s\n", error.c_str());
}

} // namespace reshard::gpu
