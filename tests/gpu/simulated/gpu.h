// SPDX-License-Identifier: Apache-2.0
// Simulated GPUs: the functions of CUDA's runtime and of NCCL that executor/backends/cuda.cpp,
// executor/backends/nccl.cpp and tests/gpu use, on the host, as strict and as late as the real ones may be. Enqueued
// work starts only when a thread waits for it or queries it; streams run in any order, and the nodes of a graph in any
// order that its edges allow. Kernels run the GPU's code, lane by lane (tests/kernels/gpu_lanes.h). An inaccessible
// page follows each device allocation. Calls that a capture forbids return errors. Every other misuse ends the process
// with a message; so do streams, graphs or memory that are not released.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

/// The result of a step: the work is done, it needs more steps, or it depends on other work.
enum class State { done, more, stuck };
using Step = std::function<State()>; // called until it returns done
using Work = std::function<Step()>;  // starts the work; for a graph, once per launch

/// Work that completes in one step.
Work atOnce(std::function<void()> act);

[[noreturn]] void die(const std::string &text);

/// A graph that is being captured, and the streams that have joined the capture.
struct Capture {
  cudaGraph_t graph = nullptr;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::set<cudaStream_t> streams;
  bool broken = false;
};

/// The progress of an event. Shared, because pending work may refer to a destroyed event.
struct Progress {
  uint64_t recorded = 0, done = 0;
};

} // namespace simulated

struct CUgraphNode_st {
  simulated::Work work;
  std::vector<cudaGraphNode_t> after;
};
struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
  simulated::Work work;
  std::shared_ptr<simulated::Progress> launches = std::make_shared<simulated::Progress>();
};
struct CUevent_st {
  int device = 0;
  std::shared_ptr<simulated::Progress> progress = std::make_shared<simulated::Progress>();
  simulated::Capture *capture = nullptr; // the capture in which it was recorded last
  std::vector<cudaGraphNode_t> nodes;
};
struct CUstream_st {
  struct Task {
    simulated::Step step;
    std::function<bool()> ready; // empty: always ready
  };
  int device = 0;
  bool destroyed = false; // deleted when its work is done
  std::deque<Task> tasks;
  simulated::Capture *capture = nullptr;
  std::vector<cudaGraphNode_t> last; // of a capture: the predecessors of the next node
};

namespace simulated {

/// All simulated devices. Every runtime function holds the mutex.
class Gpu {
public:
  static constexpr int kDevices = 8;

  static Gpu &get();
  ~Gpu();

  std::recursive_mutex mutex;
  std::mt19937_64 random{1};

  /// Appends work to a stream, or to the graph that the stream captures.
  cudaError_t enqueue(cudaStream_t stream, Work work, std::function<bool()> ready = {});
  /// Runs a few steps of enqueued work; returns whether any step made progress.
  bool advance();
  /// Returns whether all streams of a device are empty.
  bool idle(int device) const;
  /// Advances work, and lets other threads run, until `done`; ends the process if nothing makes progress for long.
  void waitFor(const std::function<bool()> &done, const char *what);

  /// Returns an error, and breaks the capture, if this thread's or the stream's capture forbids the call.
  cudaError_t permitted(cudaStream_t stream = nullptr);
  cudaError_t beginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
  cudaError_t endCapture(cudaStream_t stream, cudaGraph_t *graph);
  cudaError_t follow(cudaStream_t stream, cudaEvent_t event);

  cudaError_t allocate(size_t bytes, void **memory);
  cudaError_t release(void *memory);
  /// Returns the device of an address, or -1 for host memory. Ends the process if `bytes` exceed the allocation.
  int deviceOf(const void *memory, size_t bytes = 1) const;

  cudaStream_t addStream(int device);
  void removeStream(cudaStream_t stream);
  /// Numbers of live objects by kind. All must be 0 at exit.
  std::map<std::string, int> alive;

private:
  struct Allocation {
    int device;
    size_t bytes;
    void *pages;
    size_t pageBytes;
  };
  std::map<uintptr_t, Allocation> memory_; // by address
  std::vector<std::unique_ptr<CUstream_st>> streams_;
  std::vector<std::unique_ptr<Capture>> captures_; // active ones
};

/// Returns the work of a graph: its nodes in a random order that its edges allow.
Work workOf(const CUgraph_st &graph);

/// The current device of this thread.
int &currentDevice();

} // namespace simulated
