// SPDX-License-Identifier: Apache-2.0
// The interface of a backend of the recorded transport with one rank per process: messages between devices, enqueued in
// batches. The module of transport `nccl` is libreshard_nccl.so (executor/interfaces/module.cpp).
#pragma once

#include "executor/interfaces/device.h"
#include "executor/rendezvous/rendezvous.h"

namespace reshard {

/// The communicator of one rank.
class Communicator {
public:
  virtual ~Communicator() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// Gathers `bytes` bytes of host memory of every rank into `all`, by rank. Waits for all ranks.
  virtual Status allGather(const std::byte *mine, size_t bytes, std::byte *all, const Deadline &deadline) = 0;
  /// Enqueues sends and receives on a stream (Device::stream) as one group, so that none waits for another. May block
  /// while ranks connect to each other for the first time.
  virtual Status exchange(const std::vector<P2pOp> &ops, void *stream, const Deadline &deadline) = 0;
  /// Enqueues a barrier of all ranks.
  virtual Status barrier(void *stream, const Deadline &deadline) = 0;
  /// Fails if enqueued work has failed.
  virtual Status check() = 0;
  /// Aborts enqueued messages. Afterwards nothing can be enqueued.
  virtual void abandon() = 0;
};

/// How a rank finds the others.
struct CommunicatorOptions {
  uint32_t rank = 0, size = 1;
  /// Device::number.
  int device = 0;
  /// The caller's ncclComm_t, used instead of a new one; null: create one.
  void *communicator = nullptr;
  /// By which rank 0's unique id reaches the others, as its hello. Null: NCCL makes the same id on every rank
  /// (NCCL_COMM_ID). It outlives the communicator.
  Rendezvous *rendezvous = nullptr;
  Deadline deadline;
};

constexpr uint32_t kCommunicatorVersion = 4;
/// The function that a module exports as `reshard_open_communicator`. Returns a communicator, or null and sets `error`.
using OpenCommunicator = Communicator *(*)(const CommunicatorOptions &options, Status &error);

/// Loads the module of a communicator and opens it.
Result<std::unique_ptr<Communicator>> openCommunicator(const std::string &name, const CommunicatorOptions &options);

} // namespace reshard
