// SPDX-License-Identifier: Apache-2.0
// The functions of CUDA's runtime that reshard uses.

#include "tests/gpu/simulated/gpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector_types.h>

using namespace simulated;

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

/// Returns true for a stream; ends the process for the null stream, which is not simulated.
bool known(cudaStream_t stream) {
  return stream ? true
                : (die("the null stream is used, which waits for all other streams and is not simulated"), false);
}

} // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int *count) {
  *count = Gpu::kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = currentDevice();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= Gpu::kDevices)
    return cudaErrorInvalidDevice;
  currentDevice() = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount)
    die("device attribute " + std::to_string(attribute) + " is not simulated");
  *value = 3;
  return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess:
    return "no error";
  case cudaErrorNotReady:
    return "device not ready";
  case cudaErrorStreamCaptureUnsupported:
    return "operation not permitted when stream is capturing";
  case cudaErrorStreamCaptureInvalidated:
    return "operation failed due to a previous error during capture";
  case cudaErrorStreamCaptureUnjoined:
    return "capturing stream has unjoined work";
  case cudaErrorStreamCaptureIsolation:
    return "dependency created on uncaptured work in another stream";
  default:
    break;
  }
  thread_local std::string text;
  text = "simulated error " + std::to_string(error);
  return text.c_str();
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  const Lock lock(Gpu::get().mutex);
  const cudaError_t error = Gpu::get().permitted();
  return error ? error : Gpu::get().allocate(bytes, memory);
}
cudaError_t cudaFree(void *memory) {
  const Lock lock(Gpu::get().mutex);
  const cudaError_t error = Gpu::get().permitted();
  return error || !memory ? error : Gpu::get().release(memory);
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
  const Lock lock(Gpu::get().mutex);
  ++Gpu::get().alive["host allocations"];
  *memory = std::malloc(bytes);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *memory) {
  const Lock lock(Gpu::get().mutex);
  --Gpu::get().alive["host allocations"];
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted())
    return error;
  if (Gpu::get().deviceOf(memory, bytes) < 0)
    return cudaErrorInvalidValue;
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, cudaMemcpyKind) {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted())
    return error;
  Gpu::get().deviceOf(target, bytes);
  Gpu::get().deviceOf(source, bytes);
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  known(stream);
  Gpu &gpu = Gpu::get();
  const bool fromHost = gpu.deviceOf(source, std::max<size_t>(bytes, 1)) < 0,
             toHost = gpu.deviceOf(target, std::max<size_t>(bytes, 1)) < 0;
  if ((kind == cudaMemcpyDeviceToDevice && (fromHost || toHost)) ||
      (kind == cudaMemcpyHostToDevice && (!fromHost || toHost)))
    return cudaErrorInvalidMemcpyDirection;
  if (!fromHost)
    return gpu.enqueue(stream, atOnce([=] { std::memcpy(target, source, bytes); }));
  // Pageable host memory is read before the call returns.
  auto kept =
      std::make_shared<std::vector<char>>(static_cast<const char *>(source), static_cast<const char *>(source) + bytes);
  return gpu.enqueue(stream, atOnce([=] { std::memcpy(target, kept->data(), kept->size()); }));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
  const Lock lock(Gpu::get().mutex);
  const int device = Gpu::get().deviceOf(memory);
  *attributes = {};
  attributes->type = device < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
  attributes->device = device;
  attributes->devicePointer = device < 0 ? nullptr : const_cast<void *>(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  const Lock lock(Gpu::get().mutex);
  if (flags != cudaStreamNonBlocking)
    die("a wait on the null stream is not simulated");
  *stream = Gpu::get().addStream(currentDevice());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  Gpu::get().removeStream(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted(stream))
    return error;
  for (uint64_t steps = Gpu::get().random() % 3; steps > 0; --steps)
    Gpu::get().advance();
  return stream->tasks.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted(stream))
    return error;
  Gpu::get().waitFor([&] { return stream->tasks.empty(); }, "cudaStreamSynchronize");
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted())
    return error;
  const int device = currentDevice();
  Gpu::get().waitFor([&] { return Gpu::get().idle(device); }, "cudaDeviceSynchronize");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(Gpu::get().mutex);
  known(stream);
  return Gpu::get().follow(stream, event);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  const Lock lock(Gpu::get().mutex);
  ++Gpu::get().alive["events"];
  *event = new CUevent_st;
  (*event)->device = currentDevice();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(Gpu::get().mutex);
  --Gpu::get().alive["events"];
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  known(stream);
  if (event->device != stream->device)
    return cudaErrorInvalidResourceHandle;
  event->capture = stream->capture;
  event->nodes = stream->last;
  if (stream->capture)
    return stream->capture->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  return Gpu::get().enqueue(stream, atOnce([progress = event->progress, version = ++event->progress->recorded] {
                              progress->done = version;
                            }));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(Gpu::get().mutex);
  if (const cudaError_t error = Gpu::get().permitted())
    return error;
  if (event->capture)
    return cudaErrorCapturedEvent;
  for (uint64_t steps = Gpu::get().random() % 3; steps > 0; --steps)
    Gpu::get().advance();
  return event->progress->done == event->progress->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Lock lock(Gpu::get().mutex);
  known(stream);
  return Gpu::get().beginCapture(stream, mode);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  const Lock lock(Gpu::get().mutex);
  return Gpu::get().endCapture(stream, graph);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  const Lock lock(Gpu::get().mutex);
  *status = !stream->capture          ? cudaStreamCaptureStatusNone
            : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  const Lock lock(Gpu::get().mutex);
  cudaStreamIsCapturing(stream, status);
  if (id || edges)
    die("capture ids and edge data are not simulated");
  if (*status == cudaStreamCaptureStatusActive) {
    *graph = stream->capture->graph;
    *nodes = stream->last.data();
    *count = stream->last.size();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes, const cudaGraphEdgeData *,
                                                size_t count, unsigned flags) {
  const Lock lock(Gpu::get().mutex);
  if (!stream->capture)
    return cudaErrorIllegalState;
  if (flags == cudaStreamSetCaptureDependencies)
    stream->last.clear();
  stream->last.insert(stream->last.end(), nodes, nodes + count);
  return cudaSuccess;
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *before,
                                       size_t count, cudaGraph_t child) {
  const Lock lock(Gpu::get().mutex);
  graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{workOf(*child), {before, before + count}}));
  *node = graph->nodes.back().get();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  const Lock lock(Gpu::get().mutex);
  ++Gpu::get().alive["executable graphs"];
  *executable = new CUgraphExec_st;
  (*executable)->work = workOf(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
  known(stream);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Lock lock(Gpu::get().mutex);
  known(stream);
  if (stream->capture)
    return Gpu::get().enqueue(stream, executable->work);
  // A launch follows the earlier launches of the same graph, on any stream.

  const auto launches = executable->launches;
  const uint64_t number = launches->recorded++;
  const Work counted = [work = executable->work, launches] {
    return [step = work(), launches] {
      const State state = step();
      launches->done += state == State::done;
      return state;
    };
  };
  return Gpu::get().enqueue(stream, counted, [launches, number] { return launches->done == number; });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Lock lock(Gpu::get().mutex);
  --Gpu::get().alive["executable graphs"];
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock(Gpu::get().mutex);
  --Gpu::get().alive["graphs"];
  delete graph;
  return cudaSuccess;
}
}
