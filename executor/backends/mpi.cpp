// SPDX-License-Identifier: Apache-2.0
// libreshard_mpi.so: a channel over MPI. If the program has not called MPI_Init, this module calls it, and MPI_Finalize
// when the last channel closes. No wait is longer than the deadline: requests are polled, and calls without a request
// run on a thread of their own, which is detached.

#include "base/backoff.h"
#include "executor/backends/liveness_lock.h"
#include "executor/interfaces/channel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mpi.h>
#include <thread>
#include <vector>

namespace reshard {
namespace {

/// The result of an MPI call.
Status checked(int code) {
  if (code == MPI_SUCCESS)
    return {};
  char message[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, message, &length);
  return failed(std::string(message, static_cast<size_t>(length)));
}

/// Waits until `done`, at most until the deadline. Returns whether it is done.
bool waitFor(const Deadline &deadline, const std::function<bool()> &done) {
  Backoff backoff;
  while (!done()) {
    if (passed(deadline))
      return false;
    backoff.wait();
  }
  return true;
}

/// Calls a blocking collective on a thread. Returns false if it has not returned at the deadline: the thread stays
/// behind, and nothing waits for it.
bool callFor(const Deadline &deadline, const std::function<void()> &call) {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  std::thread([done, call] {
    call();
    *done = true;
  }).detach();
  while (!*done) {
    if (passed(deadline))
      return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// The state of MPI in this process.
struct Start {
  std::atomic<bool> begun = false;  // this module has called MPI_Init, which can be called once
  std::atomic<bool> broken = false; // a run failed: peers may be gone, and MPI_Finalize would wait for them
  std::atomic<int> channels = 0;    // open ones; the last calls MPI_Finalize, which can be called once, too
};
Start start;

bool finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

class MpiChannel : public Channel {
public:
  MpiChannel(MPI_Comm all, const ChannelOptions &options)
      : all_(all), seconds_(options.seconds), interrupt_(options.deadline.interrupt) {
    ++start.channels;
    int rank = 0, size = 0;
    MPI_Comm_rank(all_, &rank);
    MPI_Comm_size(all_, &size);
    rank_ = static_cast<uint32_t>(rank);
    size_ = static_cast<uint32_t>(size);
    int *most = nullptr, found = 0;
    if (MPI_Comm_get_attr(all_, MPI_TAG_UB, static_cast<void *>(&most), &found) == MPI_SUCCESS && found)
      maxTag_ = static_cast<uint32_t>(*most);
  }
  ~MpiChannel() override {
    const bool last = --start.channels == 0;
    if (start.broken || finalized()) // the program may call MPI_Finalize before it closes the executor
      return;
    MPI_Comm_free(&all_);
    if (start.begun && last)
      callFor(deadlineIn(seconds_, interrupt_), [] { MPI_Finalize(); });
  }

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  uint32_t maxTag() const override { return maxTag_; }
  void reserve(size_t requests) override {
    requests_.assign(requests, MPI_REQUEST_NULL);
    expected_.assign(requests, -1);
  }

  Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    expected_[request] = -1;
    return checked(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag),
                             all_, &requests_[request]));
  }
  Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    expected_[request] = static_cast<int>(bytes);
    return checked(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag),
                             all_, &requests_[request]));
  }
  Result<bool> test(size_t request) override {
    int done = 0, bytes = 0;
    MPI_Status received;
    if (const int code = MPI_Test(&requests_[request], &done, &received); code != MPI_SUCCESS)
      return checked(code);
    if (done != 0 && expected_[request] >= 0) {
      MPI_Get_count(&received, MPI_BYTE, &bytes);
      if (bytes != expected_[request])
        return failed("received a message of " + std::to_string(bytes) + " bytes, expected " +
                      std::to_string(expected_[request]));
      expected_[request] = -1;
    }
    return done != 0;
  }
  /// MPI does not report a lost peer, but it may still have to send what it has buffered.
  Status check(uint32_t peer) override {
    int found = 0;
    return checked(MPI_Iprobe(static_cast<int>(peer), MPI_ANY_TAG, all_, &found, MPI_STATUS_IGNORE));
  }
  bool abandon(const Status &) override {
    start.broken = true;
    for (size_t r = 0; r < requests_.size(); ++r)
      if (expected_[r] >= 0 && requests_[r] != MPI_REQUEST_NULL)
        MPI_Cancel(&requests_[r]);
    return false;
  }

private:
  MPI_Comm all_;
  uint32_t rank_ = 0, size_ = 1;
  uint32_t maxTag_ = 32767; // the minimum of the standard
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_; // by request: bytes of a pending receive; -1: none
  const double seconds_;
  Interrupt *const interrupt_;
};

/// Calls MPI_Init on a thread, since it returns only when all processes have called it.
Status initialize(const Deadline &deadline, const LivenessLock &livenessLock) {
  if (start.begun.exchange(true))
    return failed("an earlier call of MPI_Init has not returned; start a new process");
  const auto code = std::make_shared<int>(MPI_SUCCESS);
  auto call = [code] {
    int provided = 0;
    // Serialized: several threads call MPI, one at a time.
    *code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  };
  if (!callFor(deadline, call))
    return timedOut("timed out in MPI_Init: " + livenessLock.missing());
  if (*code != MPI_SUCCESS)
    return checked(*code).withPrefix("MPI_Init_thread: ");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  return {};
}

/// A communicator of its own, so that tags cannot clash with the program's.
Result<MPI_Comm> duplicateWorld(const Deadline &deadline, const LivenessLock &livenessLock) {
  struct Duplicate {
    MPI_Comm all = MPI_COMM_NULL;
    MPI_Request request;
  };
  auto duplicate = std::make_unique<Duplicate>(); // on the heap: after a timeout MPI may still write to it
  if (const int code = MPI_Comm_idup(MPI_COMM_WORLD, &duplicate->all, &duplicate->request); code != MPI_SUCCESS)
    return checked(code).withPrefix("MPI_Comm_idup: ");
  int done = 0, code = MPI_SUCCESS;
  if (!waitFor(deadline, [&] {
        code = MPI_Test(&duplicate->request, &done, MPI_STATUS_IGNORE);
        return done != 0 || code != MPI_SUCCESS;
      })) {
    [[maybe_unused]] Duplicate *const leaked = duplicate.release();
    start.broken = true;
    return timedOut("timed out in MPI_Comm_idup: " + livenessLock.missing());
  }
  if (code != MPI_SUCCESS)
    return checked(code).withPrefix("MPI_Comm_idup: ");
  MPI_Comm_set_errhandler(duplicate->all, MPI_ERRORS_RETURN);
  return duplicate->all;
}

Result<Channel *> openMpiChannel(const ChannelOptions &options) {
  static const LivenessLock livenessLock; // held until the process ends
  if (finalized())
    return failed("MPI is finalized, which happens when the last executor is closed; to open another one later, call "
                  "MPI_Init and MPI_Finalize in the program");
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized)
    if (Status status = initialize(options.deadline, livenessLock); !status.ok())
      return status;
  const Result<MPI_Comm> all = duplicateWorld(options.deadline, livenessLock);
  if (!all.ok())
    return all.status();
  return new MpiChannel(*all, options);
}

} // namespace
} // namespace reshard

extern "C" {

extern const uint32_t reshard_open_channel_version = reshard::kChannelVersion;

reshard::Channel *reshard_open_channel(const reshard::ChannelOptions &options, reshard::Status &error) {
  const reshard::Result<reshard::Channel *> channel = reshard::openMpiChannel(options);
  error = channel.status();
  return channel.ok() ? *channel : nullptr;
}
}
