// What a backend gives to the recorded transport where ranks are processes: messages between devices, enqueued in
// groups. The module of transport `nccl` is libreshard_nccl.so (executor/module.h).
#pragma once

#include "executor/device.h"

namespace reshard {

/// One rank's end. All error texts are empty on success.
class Communicator {
public:
  virtual ~Communicator() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// Gathers `bytes` bytes of host memory of every rank, by rank; waits for all.
  virtual std::string allGather(const std::byte *mine, size_t bytes, std::byte *all, const Deadline &deadline,
                                bool &timedOut) = 0;
  /// Enqueues transfers on a stream of the device (Device::stream), as one: none waits for another. Ranks that meet for
  /// the first time may wait for each other here.
  virtual std::string exchange(const std::vector<P2pOp> &ops, void *stream, const Deadline &deadline,
                               bool &timedOut) = 0;
  /// Enqueues what is done when all ranks have come to it.
  virtual std::string barrier(void *stream, const Deadline &deadline, bool &timedOut) = 0;
  /// Whether what was enqueued has failed.
  virtual std::string check() = 0;
  /// Ends what is on its way. Nothing can be enqueued any more.
  virtual void abandon() = 0;
};

/// How a rank finds the others.
struct CommunicatorOptions {
  uint32_t rank = 0, size = 1;
  /// Of the device (Device::number).
  int device = 0;
  /// An ncclComm_t of the caller's, used in place of one of our own; null: none.
  void *communicator = nullptr;
  /// Makes rank 0's id known to all: reads it there, writes it elsewhere. Empty: every rank finds the same id by
  /// itself.
  std::function<std::string(std::byte *id, size_t bytes, const Deadline &deadline, bool &timedOut)> share;
  Deadline deadline;
};

constexpr uint32_t kCommunicatorVersion = 1;
/// What a module exports as `reshard_open_communicator`: a group, or null and an error text of at most `room` bytes;
/// `*timed_out` is not 0 where it says that the deadline passed.
using OpenCommunicator = Communicator *(*)(const CommunicatorOptions &options, char *error, size_t room,
                                           int *timed_out);

/// Loads the module of a group and opens it.
std::string openCommunicator(const std::string &name, const CommunicatorOptions &options,
                             std::unique_ptr<Communicator> &communicator, bool &timedOut);

} // namespace reshard
