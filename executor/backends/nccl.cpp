// SPDX-License-Identifier: Apache-2.0
// libreshard_nccl.so: a communicator over NCCL. It is non-blocking: every wait for another rank polls and has a
// deadline.

#include "base/backoff.h"
#include "executor/backends/current_device.h"
#include "executor/interfaces/communicator.h"

#include <cstring>
#include <future>
#include <memory>
#include <nccl.h>
#include <thread>

namespace reshard {
namespace {

/// How long closing waits for peers, which may be gone.
constexpr std::chrono::seconds kGracePeriod(10);
/// Polls before a wait begins to sleep.
constexpr uint64_t kSpins = 1000;

class NcclCommunicator : public Communicator {
public:
  explicit NcclCommunicator(int device) : device_(device) {}
  ~NcclCommunicator() override {
    const CurrentDevice current(device_);
    if (stream_)
      cudaStreamDestroy(stream_);
    cudaFree(word_);
    if (!comm_ || !own_ || abandoned_)
      return;
    if (settled(ncclCommFinalize(comm_), std::chrono::steady_clock::now() + kGracePeriod).ok())
      ncclCommDestroy(comm_);
    else
      NcclCommunicator::abandon();
  }

  Status open(const CommunicatorOptions &options) {
    cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    error = error ? error : cudaMalloc(&word_, sizeof(int));
    error = error ? error : cudaMemset(word_, 0, sizeof(int));
    if (error)
      return checked(error);
    if (options.communicator) {
      comm_ = static_cast<ncclComm_t>(options.communicator);
      own_ = false;
    } else {
      ncclUniqueId id;
      if (options.rank == 0 || !options.rendezvous)
        if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
          return checked(result);
      if (options.rendezvous)
        if (Status status = shareId(*options.rendezvous, id, options.deadline); !status.ok())
          return status;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      const ncclResult_t result =
          ncclCommInitRankConfig(&comm_, static_cast<int>(options.size), id, static_cast<int>(options.rank), &config);
      if (Status status = settled(result, options.deadline); !status.ok()) {
        if (comm_)
          abandon();
        return status.timedOut() ? std::move(status).withSuffix(": not all ranks have joined") : status;
      }
    }
    int rank = 0, size = 0;
    ncclResult_t result = ncclCommUserRank(comm_, &rank);
    result = result == ncclSuccess ? ncclCommCount(comm_, &size) : result;
    rank_ = static_cast<uint32_t>(rank);
    size_ = static_cast<uint32_t>(size);
    return checked(result);
  }

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }

  Status allGather(const std::byte *mine, size_t bytes, std::byte *all, const Deadline &deadline) override {
    if (Status status = check(); !status.ok())
      return status;
    const CurrentDevice current(device_);
    void *memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, bytes * (uint64_t{size_} + 1)); error != cudaSuccess)
      return checked(error);
    auto *gathered = static_cast<std::byte *>(memory) + bytes;
    Status status = checked(cudaMemcpyAsync(memory, mine, bytes, cudaMemcpyHostToDevice, stream_));
    if (status.ok())
      status = settled(ncclAllGather(memory, gathered, bytes, ncclChar, comm_, stream_), deadline);
    Backoff backoff(kSpins);
    for (cudaError_t state = cudaErrorNotReady; status.ok() && state == cudaErrorNotReady;) {
      state = cudaStreamQuery(stream_);
      if (state != cudaErrorNotReady)
        status = checked(state);
      else if (passed(deadline))
        status = timedOut("timed out");
      else if (status = check(); status.ok())
        backoff.wait();
    }
    if (status.ok())
      status = checked(cudaMemcpy(all, gathered, bytes * size_, cudaMemcpyDeviceToHost));
    else
      abandon(); // so that NCCL no longer uses the memory that is freed next
    cudaFree(memory);
    return status;
  }

  Status exchange(const std::vector<P2pOp> &ops, void *stream, const Deadline &deadline) override {
    const CurrentDevice current(device_);
    ncclResult_t result = ncclGroupStart();
    for (const P2pOp &op : ops) {
      const auto peer = static_cast<int>(op.peer);
      const auto queue = static_cast<cudaStream_t>(stream);
      const ncclResult_t added = op.send ? ncclSend(op.memory, op.bytes, ncclChar, peer, comm_, queue)
                                         : ncclRecv(op.memory, op.bytes, ncclChar, peer, comm_, queue);
      if (result == ncclSuccess && added != ncclInProgress)
        result = added;
    }
    const ncclResult_t ended = ncclGroupEnd();
    return settled(result == ncclSuccess ? ended : result, deadline);
  }

  Status barrier(void *stream, const Deadline &deadline) override {
    const CurrentDevice current(device_);
    return settled(ncclAllReduce(word_, word_, 1, ncclInt, ncclMax, comm_, static_cast<cudaStream_t>(stream)),
                   deadline);
  }

  Status check() override {
    if (abandoned_)
      return failed("the communicator was aborted");
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    state = result == ncclSuccess ? state : result;
    return state == ncclInProgress ? Status() : checked(state);
  }

  /// ncclCommAbort may wait for peers, too: it runs on a thread, which stays behind after kGracePeriod.
  void abandon() override {
    if (abandoned_)
      return;
    abandoned_ = true;
    auto aborted = std::make_shared<std::promise<void>>();
    std::thread([communicator = comm_, device = device_, aborted] {
      const CurrentDevice current(device);
      ncclCommAbort(communicator);
      aborted->set_value();
    }).detach();
    aborted->get_future().wait_for(kGracePeriod);
  }

private:
  /// Gives rank 0's id to all ranks.
  static Status shareId(Rendezvous &rendezvous, ncclUniqueId &id, const Deadline &deadline) {
    const std::string_view own(reinterpret_cast<const char *>(&id), rendezvous.rank() == 0 ? sizeof id : 0);
    if (Status status = rendezvous.join(own, deadline); !status.ok() || rendezvous.rank() == 0)
      return status;
    const Result<std::string> hello = rendezvous.hello(0, deadline);
    if (!hello.ok())
      return hello.status();
    if (hello->size() != sizeof id)
      return failed("rank 0 gave an id of " + std::to_string(hello->size()) + " bytes, expected " +
                    std::to_string(sizeof id) + "; use the same release of NCCL in all processes");
    std::memcpy(&id, hello->data(), sizeof id);
    return {};
  }

  Status checked(ncclResult_t result) const {
    if (result == ncclSuccess)
      return {};
    const char *last = ncclGetLastError(comm_);
    return failed(std::string("NCCL: ") + ncclGetErrorString(result) +
                  (last && *last ? std::string(": ") + last : std::string()));
  }
  static Status checked(cudaError_t error) {
    return error == cudaSuccess ? Status() : failed(cudaGetErrorString(error));
  }

  /// Waits until a call is complete. Returns its result.
  Status settled(ncclResult_t result, const Deadline &deadline) {
    Backoff backoff(kSpins);
    while (result == ncclInProgress) {
      if (passed(deadline))
        return timedOut("timed out");
      backoff.wait();
      if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result); asked != ncclSuccess)
        result = asked;
    }
    return checked(result);
  }

  const int device_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr; // for allGather
  void *word_ = nullptr;          // operand of barrier; its value is not used
  uint32_t rank_ = 0, size_ = 1;
  bool own_ = true, abandoned_ = false;
};

} // namespace
} // namespace reshard

extern "C" {

extern const uint32_t reshard_open_communicator_version = reshard::kCommunicatorVersion;

reshard::Communicator *reshard_open_communicator(const reshard::CommunicatorOptions &options, reshard::Status &error) {
  const reshard::CurrentDevice current(options.device);
  auto communicator = std::make_unique<reshard::NcclCommunicator>(options.device);
  error = communicator->open(options);
  return error.ok() ? communicator.release() : nullptr;
}
}
