// Graphs that meet: the caller's own, captured before the first refit, and what the caller's hook adds to the refit's.

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

/// Copies of targets, made by the device.
struct Copies {
  std::vector<std::byte *> of; // by piece; null where it is no target
  explicit Copies(PlanOnGpu &plan) {
    for (const PlanOnGpu::Piece &piece : plan.pieces()) {
      of.push_back(nullptr);
      if (piece.endpoint > 0)
        gpu::need(plan.device().allocate(piece.bytes + 1, of.back()));
    }
  }
  void enqueue(const PlanOnGpu &plan, cudaStream_t stream) const {
    for (size_t p = 0; p < of.size(); ++p)
      if (of[p])
        need(cudaMemcpyAsync(of[p], plan.pieces()[p].there, plan.pieces()[p].bytes, cudaMemcpyDeviceToDevice, stream));
  }
  /// Of the copies, in place of the targets.
  uint64_t mismatches(PlanOnGpu &plan, uint64_t seed) const {
    for (size_t p = 0; p < of.size(); ++p)
      if (of[p])
        gpu::need(plan.device().copy(plan.pieces()[p].host, of[p], plan.pieces()[p].bytes));
    uint64_t checked = 0;
    const uint64_t wrong = plan.mismatchesOnHost(seed, checked);
    return checked > 0 ? wrong : throw std::runtime_error("nothing was checked");
  }
};

int answer(void *, const char *, uint32_t) { return 0; }

} // namespace

/// A consumer's graph reads the targets by their addresses. It is captured once, and sees each refit's values.
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
      throw std::runtime_error("a consumer's graph saw " + std::to_string(wrong) + " wrong elements after refit " +
                               std::to_string(seed));
  }
  need(cudaGraphExecDestroy(graph));
  need(cudaGraphDestroy(captured));
  need(cudaStreamDestroy(stream));
  std::printf("  a consumer's graph sees the values of three refits\n");
}

/// What a hook enqueues while the refit is captured is done in every refit, after its last byte.
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
      throw std::runtime_error("what the hook derives had " + std::to_string(wrong) + " wrong elements after refit " +
                               std::to_string(seed));
  }
  if (hook.calls != 2)
    throw std::runtime_error("the hook was called in a run");
  std::printf("  what a hook enqueues is part of three refits\n");
}

/// A refit on a stream of the caller's, and as a part of the caller's graph: what comes after it sees its values.
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
      throw std::runtime_error("what followed refit " + std::to_string(seed) + " saw " + std::to_string(wrong) +
                               " wrong elements");
  }
  need(cudaGraphExecDestroy(graph));
  need(cudaGraphDestroy(captured));
  need(cudaStreamDestroy(stream));
  std::printf("  refits on a caller's stream and in a caller's graph are seen by what follows\n");
}

namespace {

/// What prepare says where all params are bound to memory that `allocate` gives; nothing may have been written to it.
std::string refusal(const std::string &path, const std::function<std::byte *(size_t)> &allocate) {
  reshard_options options{};
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

/// Memory that is not the device's is refused before anything moves.
void testRefusals(const std::string &path) {
  std::vector<std::unique_ptr<std::byte[]>> ofHost;
  std::string error =
      refusal(path, [&](size_t bytes) { return ofHost.emplace_back(std::make_unique<std::byte[]>(bytes)).get(); });
  if (error != "source rank 0 param 'a': found host memory, expected memory of device 0")
    throw std::runtime_error("memory of the host was not refused: " + error);
  std::printf("  memory of the host is refused: %s\n", error.c_str());
  int devices = 0;
  need(cudaGetDeviceCount(&devices));
  if (devices < 2)
    return;
  std::unique_ptr<Device> other;
  gpu::need(openDevice("cuda", 1, other));
  error = refusal(path, [&](size_t bytes) {
    std::byte *memory = nullptr;
    gpu::need(other->allocate(bytes, memory));
    return memory;
  });
  if (error != "source rank 0 param 'a': found memory of device 1, expected memory of device 0")
    throw std::runtime_error("memory of another device was not refused: " + error);
  std::printf("  memory of another device is refused: %s\n", error.c_str());
}

} // namespace reshard::gpu
