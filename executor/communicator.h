// The interface of a backend of the recorded transport with one rank per process: messages between devices, enqueued in
// batches. The module of transport `nccl` is libreshard_nccl.so (executor/module.h).
#pragma once

#include "executor/device.h"

namespace reshard {

/// The communicator of one rank. All error texts are empty on success; `timedOut` is set if the deadline passed.
class Communicator {
public:
  virtual ~Communicator() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// Gathers `bytes` bytes of host memory of every rank into `all`, by rank. Waits for all ranks.
  virtual std::string allGather(const std::byte *mine, size_t bytes, std::byte *all, const Deadline &deadline,
                                bool &timedOut) = 0;
  /// Enqueues sends and receives on a stream (Device::stream) as one group, so that none waits for another. May block
  /// while ranks connect to each other for the first time.
  virtual std::string exchange(const std::vector<P2pOp> &ops, void *stream, const Deadline &deadline,
                               bool &timedOut) = 0;
  /// Enqueues a barrier of all ranks.
  virtual std::string barrier(void *stream, const Deadline &deadline, bool &timedOut) = 0;
  /// An error text if enqueued work has failed.
  virtual std::string check() = 0;
  /// Aborts enqueued messages. Afterwards nothing can be enqueued.
  virtual void abandon() = 0;
};

/// How a rank finds the others (rendezvous).
struct CommunicatorOptions {
  uint32_t rank = 0, size = 1;
  /// Device::number.
  int device = 0;
  /// The caller's ncclComm_t, used instead of a new one; null: create one.
  void *communicator = nullptr;
  /// Broadcasts rank 0's unique id: reads `id` on rank 0, writes it on the others. Empty: NCCL makes the same id on
  /// every rank (NCCL_COMM_ID).
  std::function<std::string(std::byte *id, size_t bytes, const Deadline &deadline, bool &timedOut)> share;
  Deadline deadline;
};

constexpr uint32_t kCommunicatorVersion = 1;
/// The function that a module exports as `reshard_open_communicator`. Returns a communicator, or null and an error text
/// of at most `room` bytes; `*timed_out` is not 0 if the deadline passed.
using OpenCommunicator = Communicator *(*)(const CommunicatorOptions &options, char *error, size_t room,
                                           int *timed_out);

/// Loads the module of a communicator and opens it. Returns an error text; empty on success.
std::string openCommunicator(const std::string &name, const CommunicatorOptions &options,
                             std::unique_ptr<Communicator> &communicator, bool &timedOut);

} // namespace reshard
