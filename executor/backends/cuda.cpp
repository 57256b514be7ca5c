// SPDX-License-Identifier: Apache-2.0
// libreshard_cuda.so: a GPU. record() captures all operations from a stream as one CUDA graph; replay() launches it.

#include "executor/backends/current_device.h"
#include "executor/interfaces/communicator.h"
#include "executor/interfaces/device.h"
#include "kernels/gpu/launch.h"

#include <chrono>
#include <functional>

namespace reshard {
namespace {

/// How long the destructor waits for aborted work.
constexpr std::chrono::seconds kGracePeriod(1);

Status checked(cudaError_t error) { return error == cudaSuccess ? Status() : failed(cudaGetErrorString(error)); }

class CudaDevice : public Device {
public:
  explicit CudaDevice(int number) : number_(number) {}
  ~CudaDevice() override {
    const CurrentDevice current(number_);
    // An aborted communicator ends its kernels soon.
    const auto end = std::chrono::steady_clock::now() + kGracePeriod;
    while (abandoned_ && cudaStreamQuery(stream_) == cudaErrorNotReady)
      if (std::chrono::steady_clock::now() > end)
        return; // leak the memory that running kernels still use
    if (stream_)
      cudaStreamSynchronize(stream_); // late work still writes
    if (graph_)
      cudaGraphExecDestroy(graph_);
    if (captured_)
      cudaGraphDestroy(captured_);
    for (const cudaEvent_t event : {done_, turn_})
      if (event)
        cudaEventDestroy(event);
    for (const cudaStream_t stream : {stream_, concurrent_})
      if (stream)
        cudaStreamDestroy(stream);
    if (begun_)
      cudaFreeHost(const_cast<uint32_t *>(begun_));
    for (void *memory : memory_)
      cudaFree(memory);
    cudaFree(digestMemory_);
  }

  Status open() {
    const CurrentDevice current(number_);
    void *begun = nullptr;
    cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    error = error ? error : cudaStreamCreateWithFlags(&concurrent_, cudaStreamNonBlocking);
    error = error ? error : cudaEventCreateWithFlags(&done_, cudaEventDisableTiming);
    error = error ? error : cudaEventCreateWithFlags(&turn_, cudaEventDisableTiming);
    error = error ? error : cudaHostAlloc(&begun, sizeof *begun_, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error)
      return checked(error);
    begun_ = static_cast<uint32_t *>(begun);
    *begun_ = 0;
    void *seen = nullptr;
    error = cudaHostGetDevicePointer(&seen, begun, 0);
    begunOnDevice_ = static_cast<uint32_t *>(seen);
    return checked(error);
  }

  int number() const override { return number_; }

  Result<std::byte *> allocate(uint64_t bytes) override {
    const CurrentDevice current(number_);
    void *allocated = nullptr;
    if (const cudaError_t error = cudaMalloc(&allocated, bytes); error != cudaSuccess)
      return checked(error);
    memory_.push_back(allocated);
    const cudaError_t error = cudaMemset(allocated, 0, bytes);
    if (Status status = checked(error ? error : cudaDeviceSynchronize()); !status.ok())
      return status;
    return static_cast<std::byte *>(allocated);
  }

  Status copy(std::byte *target, const std::byte *source, uint64_t bytes) override {
    const CurrentDevice current(number_);
    return checked(cudaMemcpy(target, source, bytes, cudaMemcpyDefault));
  }

  Status digest(const kernels::DigestTable &table, std::vector<uint64_t> &sums) override {
    if (table.empty())
      return {};
    const CurrentDevice current(number_);
    const std::vector<kernels::PlaceKeys> keys(1, kernels::kPlaceKeys);
    std::vector<uint64_t> own(2 * size_t{table.digests()});
    kernels::DigestTableView view = table.view(nullptr);
    const uint64_t *there = nullptr;
    Upload upload;
    upload.add(own, there).add(keys, view.keys).add(table.numbers(), view.numbers);
    addTo(upload, table.units(), view.units);
    if (upload.bytes() > digestBytes_) {
      cudaFree(digestMemory_);
      digestMemory_ = nullptr;
      digestBytes_ = 0;
      if (const cudaError_t error = cudaMalloc(&digestMemory_, upload.bytes()); error != cudaSuccess)
        return checked(error).withPrefix("cannot allocate a table of digests: ");
      digestBytes_ = upload.bytes();
    }
    uint32_t blocks = 0;
    Status status = upload.to(static_cast<std::byte *>(digestMemory_), *this);
    if (status.ok())
      status = checked(kernels::launchBlocks(view.units.slots, kernels::kDigestBlocksEach, blocks));
    if (!status.ok())
      return status;
    view.sums = const_cast<uint64_t *>(there);
    cudaError_t error = cudaDeviceSynchronize(); // the caller's streams may still write the memory
    error = error ? error : kernels::launchDigests(view, blocks, stream_);
    error = error ? error : cudaStreamSynchronize(stream_);
    error = error ? error : cudaMemcpy(own.data(), there, own.size() * sizeof(uint64_t), cudaMemcpyDefault);
    for (size_t i = 0; i < own.size() && !error; ++i)
      sums[i] += own[i];
    return checked(error);
  }

  Status reach(const std::byte *memory) override {
    const CurrentDevice current(number_);
    cudaPointerAttributes attributes{};
    if (const cudaError_t error = cudaPointerGetAttributes(&attributes, memory); error != cudaSuccess)
      return checked(error);
    if (attributes.type == cudaMemoryTypeUnregistered || !attributes.devicePointer)
      return failed("found host memory, expected memory of device " + std::to_string(number_));
    // A GPU may not be able to access another one's memory.
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != number_)
      return failed("found memory of device " + std::to_string(attributes.device) + ", expected memory of device " +
                    std::to_string(number_));
    return {};
  }

  Status record(const std::vector<Operation> &operations, Communicator *communicator,
                const Deadline &deadline) override {
    const CurrentDevice current(number_);
    std::vector<TablesLaunch> launches;
    for (const Operation &operation : operations) {
      const auto *batch = std::get_if<P2pBatch>(&operation);
      if (Status status = upload(batch ? &batch->concurrent : std::get_if<Tables>(&operation), launches.emplace_back());
          !status.ok())
        return status;
    }
    // Relaxed mode: NCCL and the caller's hooks may allocate memory during the capture.
    if (const cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed); error != cudaSuccess)
      return checked(error);
    Status status;
    for (size_t o = 0; o < operations.size() && status.ok(); ++o) {
      const auto number = static_cast<uint32_t>(o);
      if (const auto *batch = std::get_if<P2pBatch>(&operations[o])) {
        // The concurrent launch of a batch is on another branch of the graph. It is launched even if it is empty, since
        // it reports that the batch has started (begun()).
        status = follow(stream_, concurrent_);
        if (status.ok())
          status = launch(launches[o], number, concurrent_);
        if (status.ok())
          status = communicator->exchange(batch->ops, stream_, deadline);
        if (status.ok())
          status = follow(concurrent_, stream_);
      } else if (const Call *call = std::get_if<Call>(&operations[o])) {
        status = launch({}, number, stream_); // reports that the call has started
        if (status.ok())
          status = (*call)();
      } else {
        status = launch(launches[o], number, stream_);
      }
    }
    const cudaError_t ended = cudaStreamEndCapture(stream_, &captured_);
    if (status.ok())
      status = checked(ended);
    if (status.ok())
      status = checked(cudaGraphInstantiate(&graph_, captured_, 0));
    if (status.ok())
      status = checked(cudaGraphUpload(graph_, stream_));
    return status.ok() ? checked(cudaStreamSynchronize(stream_)) : status;
  }

  Status replay() override {
    const CurrentDevice current(number_);
    *begun_ = 0;
    const cudaError_t error = cudaGraphLaunch(graph_, stream_);
    return checked(error ? error : cudaEventRecord(done_, stream_));
  }

  Status enqueue(void *stream) override {
    const CurrentDevice current(number_);
    const auto on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t caller = nullptr;
    const cudaGraphNode_t *before = nullptr;
    size_t count = 0;
    cudaError_t error = cudaStreamGetCaptureInfo(on, &status, nullptr, &caller, &before, nullptr, &count);
    if (error || status == cudaStreamCaptureStatusNone)
      return checked(error ? error : cudaGraphLaunch(graph_, on));
    cudaGraphNode_t refit = nullptr;
    error = cudaGraphAddChildGraphNode(&refit, caller, before, count, captured_); // a copy
    return checked(
        error ? error : cudaStreamUpdateCaptureDependencies(on, &refit, nullptr, 1, cudaStreamSetCaptureDependencies));
  }

  Result<bool> done() override {
    const CurrentDevice current(number_);
    const cudaError_t error = cudaEventQuery(done_);
    if (error == cudaSuccess || error == cudaErrorNotReady)
      return error == cudaSuccess;
    return checked(error);
  }

  void abandon() override {
    const CurrentDevice current(number_);
    abandoned_ = true;
    if (graph_)
      cudaGraphExecDestroy(graph_); // CUDA destroys a running graph when it ends
    graph_ = nullptr;
  }

  size_t begun() const override { return *begun_; }
  void *stream() const override { return stream_; }

private:
  /// Tables in device memory.
  struct CopyLaunch {
    kernels::CopyTableView table{};
    uint32_t blocks = 1;
  };
  struct TablesLaunch {
    CopyLaunch copies, rest;
    kernels::ConversionTableView conversions{};
  };

  /// Enqueues the tables, one after the other. The first launch reports that operation `number` has started, even if it
  /// copies nothing.
  Status launch(const TablesLaunch &tables, uint32_t number, cudaStream_t stream) {
    cudaError_t error =
        kernels::launchCopies(tables.copies.table, tables.copies.blocks, begunOnDevice_, number, stream);
    if (!error && tables.conversions.tiles > 0)
      error = kernels::launchConversions(tables.conversions, stream);
    if (!error && tables.rest.table.slots > 0)
      error = kernels::launchCopies(tables.rest.table, tables.rest.blocks, begunOnDevice_, number, stream);
    return checked(error);
  }

  /// Makes stream `then` wait for all work that is on stream `first` now.
  Status follow(cudaStream_t first, cudaStream_t then) {
    const cudaError_t error = cudaEventRecord(turn_, first);
    return checked(error ? error : cudaStreamWaitEvent(then, turn_, 0));
  }

  /// Copies the arrays of a table into one allocation of device memory, and sets the pointers of a table view to them.
  class Upload {
  public:
    template <class T> Upload &add(const std::vector<T> &array, const T *&view) {
      arrays_.push_back({reinterpret_cast<const std::byte *>(array.data()), bytes_, array.size() * sizeof(T),
                         [&view](std::byte *there) { view = reinterpret_cast<const T *>(there); }});
      bytes_ += (arrays_.back().bytes + 15) / 16 * 16;
      return *this;
    }
    uint64_t bytes() const { return bytes_; }
    Status to(CudaDevice &device) {
      const Result<std::byte *> there = device.allocate(bytes_);
      return there.ok() ? to(*there, device)
                        : Status(there.status())
                              .withPrefix("cannot allocate a table of " + std::to_string(bytes_) + " bytes: ");
    }
    /// `there`: bytes() of device memory, 16-byte aligned.
    Status to(std::byte *there, CudaDevice &device) {
      for (const auto &[array, at, bytes, show] : arrays_) {
        if (bytes > 0)
          if (Status status = device.copy(there + at, array, bytes); !status.ok())
            return status;
        show(there + at);
      }
      return {};
    }

  private:
    struct Array {
      const std::byte *data;
      size_t at, bytes;
      std::function<void(std::byte *)> show;
    };
    std::vector<Array> arrays_;
    size_t bytes_ = 0;
  };

  static void addTo(Upload &upload, const kernels::CopyTable &table, kernels::CopyTableView &view) {
    upload.add(table.entries(), view.entries).add(table.shapes(), view.shapes).add(table.loops(), view.loops);
  }

  Status upload(const kernels::CopyTable &table, CopyLaunch &copies) {
    if (table.empty())
      return {};
    copies.table = table.view();
    Upload upload;
    addTo(upload, table, copies.table);
    Status status = upload.to(*this);
    return status.ok() ? checked(kernels::launchBlocks(copies.table.slots, kernels::kCopyBlocksEach, copies.blocks))
                       : status;
  }

  Status upload(const kernels::ConversionTable &table, kernels::ConversionTableView &view) {
    if (table.empty())
      return {};
    view = table.view();
    return Upload()
        .add(table.entries(), view.entries)
        .add(table.shapes(), view.shapes)
        .add(table.loops(), view.loops)
        .add(table.matrices(), view.matrices)
        .to(*this);
  }

  Status upload(const Tables *tables, TablesLaunch &launch) {
    if (!tables)
      return {};
    Status status = upload(tables->copies, launch.copies);
    if (status.ok())
      status = upload(tables->conversions, launch.conversions);
    return status.ok() ? upload(tables->rest, launch.rest) : status;
  }

  const int number_;
  cudaStream_t stream_ = nullptr, concurrent_ = nullptr;
  cudaEvent_t done_ = nullptr, turn_ = nullptr;
  cudaGraph_t captured_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;    // instantiated from captured_
  volatile uint32_t *begun_ = nullptr; // host memory, written by the device: the last operation that has started
  uint32_t *begunOnDevice_ = nullptr;  // its device address
  std::vector<void *> memory_;
  void *digestMemory_ = nullptr; // digestBytes_ bytes, kept from one call of digest() to the next
  uint64_t digestBytes_ = 0;
  bool abandoned_ = false;
};

} // namespace
} // namespace reshard

extern "C" {

extern const uint32_t reshard_open_device_version = reshard::kDeviceVersion;

reshard::Device *reshard_open_device(int number, reshard::Status &error) {
  int count = 0;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && number < 0)
    code = cudaGetDevice(&number);
  if (code == cudaSuccess && count == 0)
    code = cudaErrorNoDevice;
  if (error = reshard::checked(code); !error.ok())
    return nullptr;
  auto device = std::make_unique<reshard::CudaDevice>(number % count);
  error = device->open();
  return error.ok() ? device.release() : nullptr;
}
}
