// GPUs that are not there: what backends/cuda.cpp, backends/nccl.cpp and tests/gpu ask of CUDA's runtime and of NCCL,
// done by the host, as strictly and as late as these may do it. Work that was enqueued begins when somebody waits or
// asks, streams in any order, the nodes of a graph in any that their edges allow; kernels run by the code that a GPU
// runs, lane by lane (tests/kernels/gpu_lanes.h); memory of a device ends at a page that nobody may touch. What a
// stream under capture forbids is an error. Against all else that a GPU would not bear the process ends, and says why;
// so it does where streams, graphs or memory are left at its end.
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

/// What a step came to: the work is done, there is more, or nothing can be done before somebody else does something.
enum class State { done, more, stuck };
using Step = std::function<State()>; // called until it is done
using Work = std::function<Step()>;  // begins: a graph's once for each launch

/// Work that is done at once.
Work atOnce(std::function<void()> act);

[[noreturn]] void die(const std::string &text);

/// A graph that a stream's work goes into, and the streams that have joined it.
struct Capture {
  cudaGraph_t graph = nullptr;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::set<cudaStream_t> streams;
  bool broken = false;
};

/// How far an event has come; outlives it while work refers to it.
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
  simulated::Capture *capture = nullptr; // last recorded there
  std::vector<cudaGraphNode_t> nodes;
};
struct CUstream_st {
  struct Task {
    simulated::Step step;
    std::function<bool()> ready; // empty: always
  };
  int device = 0;
  bool destroyed = false; // goes when its work is done
  std::deque<Task> tasks;
  simulated::Capture *capture = nullptr;
  std::vector<cudaGraphNode_t> last; // of a capture: what comes next follows these
};

namespace simulated {

/// All devices of the process. Every function of the runtime holds the mutex.
class Gpu {
public:
  static constexpr int kDevices = 8;

  static Gpu &get();
  ~Gpu();

  std::recursive_mutex mutex;
  std::mt19937_64 random{1};

  /// At the end of a stream, or of its capture.
  cudaError_t enqueue(cudaStream_t stream, Work work, std::function<bool()> ready = {});
  /// Does a little of what is enqueued; whether there was anything that could be done.
  bool advance();
  /// Whether nothing is left to do on the streams of a device.
  bool idle(int device) const;
  /// Lets other threads go on in between; ends the process where that takes too long.
  void waitFor(const std::function<bool()> &done, const char *what);

  /// An error where a call is not permitted while this thread, or the stream, captures; the capture is broken then.
  cudaError_t permitted(cudaStream_t stream = nullptr);
  cudaError_t beginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
  cudaError_t endCapture(cudaStream_t stream, cudaGraph_t *graph);
  cudaError_t follow(cudaStream_t stream, cudaEvent_t event);

  cudaError_t allocate(size_t bytes, void **memory);
  cudaError_t release(void *memory);
  /// The device of an address; -1: the host's. Ends the process where `bytes` do not fit into what was allocated there.
  int deviceOf(const void *memory, size_t bytes = 1) const;

  cudaStream_t addStream(int device);
  void removeStream(cudaStream_t stream);
  /// What lives: by kind, +1 and -1. Nothing may at the end.
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
  std::vector<std::unique_ptr<Capture>> captures_; // under way
};

/// The work of a graph: its nodes in some order that their edges allow.
Work workOf(const CUgraph_st &graph);

/// Of this thread.
int &currentDevice();

} // namespace simulated
