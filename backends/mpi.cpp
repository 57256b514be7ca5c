// libreshard_mpi.so: a wire over MPI. The program may have called MPI_Init; else it is called here, and MPI_Finalize at the end. Nothing waits inside MPI
// for longer than the deadline: requests are polled, and what has no request runs on a thread of its own, which is left behind when it is late.

#include "backends/presence.h"
#include "executor/wire.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mpi.h>
#include <sched.h>
#include <thread>
#include <vector>

namespace reshard {
namespace {

std::string text(int code) {
  char message[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, message, &length);
  return std::string(message, static_cast<size_t>(length));
}

/// Waits until `done`, at most so many seconds; 0: for ever.
bool waitFor(double seconds, const std::function<bool()> &done) {
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    if (seconds > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() >= seconds)
      return false;
    sched_yield();
  }
  return true;
}

/// Calls something that returns when all processes have come to it. False where it has not returned in time: it never will be waited for again.
bool callFor(double seconds, const std::function<void()> &call) {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  std::thread([done, call] {
    call();
    *done = true;
  }).detach();
  const auto begin = std::chrono::steady_clock::now();
  while (!*done) {
    if (seconds > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() >= seconds)
      return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class MpiWire : public Wire {
public:
  MpiWire(MPI_Comm all, bool initialised, double seconds) : all_(all), initialised_(initialised), seconds_(seconds) {
    int rank = 0, size = 0;
    MPI_Comm_rank(all_, &rank);
    MPI_Comm_size(all_, &size);
    rank_ = static_cast<uint32_t>(rank);
    size_ = static_cast<uint32_t>(size);
  }
  ~MpiWire() override {
    if (abandoned_) // peers may be gone, and would be waited for
      return;
    if (initialised_)
      callFor(seconds_, [] { MPI_Finalize(); });
    else
      MPI_Comm_free(&all_);
  }

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  void reserve(size_t requests) override {
    requests_.assign(requests, MPI_REQUEST_NULL);
    receives_.assign(requests, false);
  }

  std::string send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    receives_[request] = false;
    return checked(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag), all_, &requests_[request]));
  }
  std::string receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    receives_[request] = true;
    return checked(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag), all_, &requests_[request]));
  }
  std::string test(size_t request, bool &done) override {
    int flag = 0;
    const int code = MPI_Test(&requests_[request], &flag, MPI_STATUS_IGNORE);
    done = flag != 0;
    return checked(code);
  }
  void abandon() override {
    abandoned_ = true;
    for (size_t r = 0; r < requests_.size(); ++r)
      if (receives_[r] && requests_[r] != MPI_REQUEST_NULL)
        MPI_Cancel(&requests_[r]);
  }

private:
  static std::string checked(int code) { return code == MPI_SUCCESS ? std::string() : text(code); }

  MPI_Comm all_;
  uint32_t rank_ = 0, size_ = 1;
  std::vector<MPI_Request> requests_;
  std::vector<bool> receives_;
  const bool initialised_;
  const double seconds_;
  bool abandoned_ = false;
};

} // namespace
} // namespace reshard

extern "C" {

extern const uint32_t reshard_open_wire_version = reshard::kWireVersion;

reshard::Wire *reshard_open_wire(double seconds, char *error, size_t room, int *timed_out) {
  using namespace reshard;
  static const Presence presence; // for as long as the process lives
  const auto begin = std::chrono::steady_clock::now();
  auto late = [&](const char *where) -> Wire * {
    std::snprintf(error, room, "the deadline passed in %s: %s", where, presence.missing().c_str());
    *timed_out = 1;
    return nullptr;
  };
  auto failed = [&](const char *where, int code) -> Wire * {
    std::snprintf(error, room, "%s: %s", where, text(code).c_str());
    return nullptr;
  };
  int before = 0;
  MPI_Initialized(&before);
  if (!before) {
    const auto code = std::make_shared<int>(MPI_SUCCESS);
    auto initialise = [code] {
      int provided = 0;
      *code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided); // called from several threads, one after the other
    };
    if (!callFor(seconds, initialise))
      return late("MPI_Init");
    if (*code != MPI_SUCCESS)
      return failed("MPI_Init_thread", *code);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  // Its own tags.
  MPI_Comm all = MPI_COMM_NULL;
  MPI_Request request;
  if (const int code = MPI_Comm_idup(MPI_COMM_WORLD, &all, &request); code != MPI_SUCCESS)
    return failed("MPI_Comm_idup", code);
  int done = 0, code = MPI_SUCCESS;
  const double left = seconds > 0 ? std::max(1e-3, seconds - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()) : 0;
  if (!waitFor(left, [&] {
        code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        return done != 0 || code != MPI_SUCCESS;
      }))
    return late("MPI_Comm_idup");
  if (code != MPI_SUCCESS)
    return failed("MPI_Comm_idup", code);
  MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN);
  return new MpiWire(all, !before, seconds);
}
}
