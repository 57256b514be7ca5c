// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/simulated/gpu.h"

#include "base/backoff.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

namespace simulated {

void die(const std::string &text) {
  std::fprintf(stderr, "simulated GPU: %s\n", text.c_str());
  std::_Exit(9);
}

int &currentDevice() {
  thread_local int device = 0;
  return device;
}

Gpu &Gpu::get() {
  static Gpu gpu;
  return gpu;
}

Gpu::~Gpu() {
  for (const auto &[kind, count] : alive)
    if (count != 0)
      die(std::to_string(count) + " " + kind + " were not released before the process ended");
}

Work workOf(const CUgraph_st &graph) {
  struct Node {
    Work work;
    std::vector<size_t> after;
  };
  std::vector<Node> nodes;
  std::map<const CUgraphNode_st *, size_t> numbers;
  for (const auto &node : graph.nodes) {
    nodes.push_back({node->work, {}});
    for (const CUgraphNode_st *before : node->after) {
      const auto known = numbers.find(before);
      if (known == numbers.end())
        die("a node of a graph depends on a node of another graph");
      nodes.back().after.push_back(known->second);
    }
    numbers[node.get()] = nodes.size() - 1;
  }
  struct Run {
    std::vector<Step> steps;
    std::vector<bool> done;
    size_t left;
  };
  return [nodes] {
    auto run =
        std::make_shared<Run>(Run{std::vector<Step>(nodes.size()), std::vector<bool>(nodes.size()), nodes.size()});
    return [nodes, run] {
      std::vector<size_t> ready;
      for (size_t n = 0; n < nodes.size(); ++n)
        if (!run->done[n] &&
            std::all_of(nodes[n].after.begin(), nodes[n].after.end(), [&](size_t before) { return run->done[before]; }))
          ready.push_back(n);
      std::shuffle(ready.begin(), ready.end(), Gpu::get().random);
      for (const size_t n : ready) {
        if (!run->steps[n])
          run->steps[n] = nodes[n].work();
        const State state = run->steps[n]();
        if (state == State::stuck)
          continue;
        run->done[n] = state == State::done;
        run->left -= run->done[n];
        return run->left > 0 ? State::more : State::done;
      }
      return run->left > 0 ? State::stuck : State::done;
    };
  };
}

Work atOnce(std::function<void()> act) {
  return [act] {
    return [act] {
      act();
      return State::done;
    };
  };
}

cudaError_t Gpu::enqueue(cudaStream_t stream, Work work, std::function<bool()> ready) {
  if (!stream->capture) {
    stream->tasks.push_back({work(), std::move(ready)});
    return cudaSuccess;
  }
  if (stream->capture->broken)
    return cudaErrorStreamCaptureInvalidated;
  auto &nodes = stream->capture->graph->nodes;
  nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{std::move(work), stream->last}));
  stream->last = {nodes.back().get()};
  return cudaSuccess;
}

bool Gpu::advance() {
  std::vector<CUstream_st *> ready;
  for (const auto &stream : streams_)
    if (!stream->tasks.empty() && (!stream->tasks.front().ready || stream->tasks.front().ready()))
      ready.push_back(stream.get());
  std::shuffle(ready.begin(), ready.end(), random);
  for (CUstream_st *stream : ready) {
    const State state = stream->tasks.front().step();
    if (state == State::done)
      stream->tasks.pop_front();
    if (state != State::stuck) {
      std::erase_if(streams_, [](const auto &each) { return each->destroyed && each->tasks.empty(); });
      return true;
    }
  }
  return false;
}

void Gpu::waitFor(const std::function<bool()> &done, const char *what) {
  constexpr std::chrono::seconds kGracePeriod(60);
  reshard::Backoff backoff;
  for (auto last = std::chrono::steady_clock::now(); !done();)
    if (advance()) {
      last = std::chrono::steady_clock::now();
      backoff.reset();
    } else {
      if (std::chrono::steady_clock::now() - last > kGracePeriod)
        die(std::string(what) + " made no progress for 60 s: deadlock");
      mutex.unlock(); // the waiting function holds it exactly once
      backoff.wait();
      mutex.lock();
    }
}

bool Gpu::idle(int device) const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [&](const auto &stream) { return stream->device != device || stream->tasks.empty(); });
}

cudaError_t Gpu::permitted(cudaStream_t stream) {
  if (stream && stream->capture) {
    stream->capture->broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  for (const auto &capture : captures_)
    if (!stream &&
        (capture->mode == cudaStreamCaptureModeGlobal ||
         (capture->mode == cudaStreamCaptureModeThreadLocal && capture->thread == std::this_thread::get_id()))) {
      capture->broken = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  return cudaSuccess;
}

cudaError_t Gpu::beginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream->capture)
    return cudaErrorIllegalState;
  ++alive["graphs"];
  captures_.push_back(
      std::make_unique<Capture>(Capture{new CUgraph_st, stream, mode, std::this_thread::get_id(), {stream}, false}));
  stream->capture = captures_.back().get();
  stream->last.clear();
  return cudaSuccess;
}

cudaError_t Gpu::endCapture(cudaStream_t stream, cudaGraph_t *graph) {
  Capture *capture = stream->capture;
  if (!capture || capture->origin != stream)
    return cudaErrorStreamCaptureUnmatched;
  // All work of other streams must precede the last work of this stream.
  std::set<cudaGraphNode_t> before;
  for (std::vector<cudaGraphNode_t> next = stream->last; !next.empty();) {
    const cudaGraphNode_t node = next.back();
    next.pop_back();
    if (before.insert(node).second)
      next.insert(next.end(), node->after.begin(), node->after.end());
  }
  bool joined = true;
  for (const cudaStream_t other : capture->streams) {
    joined = joined && std::all_of(other->last.begin(), other->last.end(),
                                   [&](cudaGraphNode_t node) { return before.count(node) > 0; });
    other->capture = nullptr;
    other->last.clear();
  }
  *graph = capture->graph;
  const cudaError_t error = capture->broken ? cudaErrorStreamCaptureInvalidated
                            : joined        ? cudaSuccess
                                            : cudaErrorStreamCaptureUnjoined;
  if (error != cudaSuccess) {
    delete capture->graph;
    --alive["graphs"];
    *graph = nullptr;
  }
  std::erase_if(captures_, [&](const auto &each) { return each.get() == capture; });
  return error;
}

cudaError_t Gpu::follow(cudaStream_t stream, cudaEvent_t event) {
  const bool live =
      std::any_of(captures_.begin(), captures_.end(), [&](const auto &each) { return each.get() == event->capture; });
  if (event->capture && !live)
    return cudaErrorCapturedEvent;
  if (!event->capture && stream->capture) {
    stream->capture->broken = true; // a graph cannot wait for work outside of it
    return cudaErrorStreamCaptureIsolation;
  }
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture)
      return cudaErrorStreamCaptureMerge;
    if (!stream->capture && !stream->tasks.empty())
      die("a stream with pending work that is not captured joins a capture");
    stream->capture = event->capture;
    event->capture->streams.insert(stream);
    for (const cudaGraphNode_t node : event->nodes)
      if (std::find(stream->last.begin(), stream->last.end(), node) == stream->last.end())
        stream->last.push_back(node);
    return cudaSuccess;
  }
  return enqueue(stream, atOnce([] {}), [progress = event->progress, version = event->progress->recorded] {
    return progress->done >= version;
  });
}

cudaError_t Gpu::allocate(size_t bytes, void **memory) {
  constexpr size_t kAlignment = 256;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t whole = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment,
               pageBytes = (whole + page - 1) / page * page + page;
  void *pages = mmap(nullptr, pageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED)
    return cudaErrorMemoryAllocation;
  auto *end = static_cast<std::byte *>(pages) + pageBytes - page;
  mprotect(end, page, PROT_NONE);
  *memory = end - whole;
  memory_[reinterpret_cast<uintptr_t>(*memory)] = {currentDevice(), bytes, pages, pageBytes};
  ++alive["allocations"];
  return cudaSuccess;
}

cudaError_t Gpu::release(void *memory) {
  const auto known = memory_.find(reinterpret_cast<uintptr_t>(memory));
  if (known == memory_.end())
    return cudaErrorInvalidValue;
  const Allocation allocation = known->second;
  waitFor([&] { return idle(allocation.device); }, "cudaFree");
  munmap(allocation.pages, allocation.pageBytes);
  memory_.erase(reinterpret_cast<uintptr_t>(memory));
  --alive["allocations"];
  return cudaSuccess;
}

int Gpu::deviceOf(const void *memory, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(memory);
  auto after = memory_.upper_bound(at);
  if (after == memory_.begin())
    return -1;
  const auto &[begin, allocation] = *std::prev(after);
  if (at >= begin + std::max<size_t>(allocation.bytes, 1))
    return -1;
  if (bytes > begin + std::max<size_t>(allocation.bytes, 1) - at)
    die("a copy of " + std::to_string(bytes) + " bytes at offset " + std::to_string(at - begin) +
        " exceeds its allocation of " + std::to_string(allocation.bytes) + " bytes");
  return allocation.device;
}

cudaStream_t Gpu::addStream(int device) {
  streams_.push_back(std::make_unique<CUstream_st>());
  streams_.back()->device = device;
  ++alive["streams"];
  return streams_.back().get();
}

void Gpu::removeStream(cudaStream_t stream) {
  stream->destroyed = true;
  --alive["streams"];
  std::erase_if(streams_, [](const auto &each) { return each->destroyed && each->tasks.empty(); });
}

} // namespace simulated
