// libreshard_mpi.so: a wire over MPI. The program may have called MPI_Init; else it is called here, and MPI_Finalize at the end.

#include "executor/wire.h"

#include <cstdio>
#include <mpi.h>
#include <vector>

namespace reshard {
namespace {

std::string text(int code) {
  char message[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, message, &length);
  return std::string(message, static_cast<size_t>(length));
}

class MpiWire : public Wire {
public:
  explicit MpiWire(bool initialised) : initialised_(initialised) {
    MPI_Comm_dup(MPI_COMM_WORLD, &all_); // its own tags
    MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN);
    int rank = 0, size = 0;
    MPI_Comm_rank(all_, &rank);
    MPI_Comm_size(all_, &size);
    rank_ = static_cast<uint32_t>(rank);
    size_ = static_cast<uint32_t>(size);
  }
  ~MpiWire() override {
    if (abandoned_) // peers may be gone, and would be waited for
      return;
    MPI_Comm_free(&all_);
    if (initialised_)
      MPI_Finalize();
  }

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  void reserve(size_t requests) override { requests_.assign(requests, MPI_REQUEST_NULL); }

  std::string send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    return checked(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag), all_, &requests_[request]));
  }
  std::string receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    return checked(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(peer), static_cast<int>(tag), all_, &requests_[request]));
  }
  std::string test(size_t request, bool &done) override {
    int flag = 0;
    const int code = MPI_Test(&requests_[request], &flag, MPI_STATUS_IGNORE);
    done = flag != 0;
    return checked(code);
  }
  std::string gather(const std::byte *mine, size_t bytes, std::byte *all) override {
    return checked(MPI_Allgather(mine, static_cast<int>(bytes), MPI_BYTE, all, static_cast<int>(bytes), MPI_BYTE, all_));
  }
  void abandon() override { abandoned_ = true; }

private:
  static std::string checked(int code) { return code == MPI_SUCCESS ? std::string() : text(code); }

  MPI_Comm all_ = MPI_COMM_NULL;
  uint32_t rank_ = 0, size_ = 1;
  std::vector<MPI_Request> requests_;
  bool initialised_, abandoned_ = false;
};

} // namespace
} // namespace reshard

extern "C" reshard::Wire *reshard_open_wire(char *error, size_t room) {
  int before = 0, provided = 0;
  MPI_Initialized(&before);
  if (!before)
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided); code != MPI_SUCCESS) {
      std::snprintf(error, room, "MPI_Init_thread: %s", reshard::text(code).c_str());
      return nullptr;
    }
  return new reshard::MpiWire(!before);
}
