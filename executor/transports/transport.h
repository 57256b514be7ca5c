// SPDX-License-Identifier: Apache-2.0
// The interface of transports, which move the bytes of a process's ranks from source to target memory. One
// implementation per file; executor.cpp chooses one by the row of executor/interfaces/transport_traits.h.
#pragma once

#include "base/deadline.h"
#include "executor/interfaces/channel.h"
#include "executor/interfaces/communicator.h"
#include "executor/load/load.h"
#include "executor/memory/copy_progress.h"
#include "executor/memory/file_copies.h"
#include "executor/memory/local_rank.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace reshard {

/// Bytes that a run moves into the memory of this process's ranks, by method (reshard_method).
struct BytesBy {
  uint64_t local = 0;        // copied within the process
  uint64_t sharedMemory = 0; // copied out of the memory of a local peer
  uint64_t messages = 0;     // received as messages
  /// The part of `messages` from ranks of this host whose memory cannot be mapped; 0 without the shortcut.
  uint64_t messagesInsideHost = 0;
};

class Transport {
public:
  using Deadline = reshard::Deadline;

  virtual ~Transport() = default;
  /// Checks that the transport can access the bound memory of a rank. The error names a param whose memory it cannot
  /// access, and is of kind badBinding.
  virtual Status reach(const Plan &, const LocalRank &) const { return {}; }
  /// Called once, when everything is bound; allocates all that run() needs.
  virtual Status prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline) = 0;
  /// Moves every byte; allocates nothing.
  virtual Status run(Deadline deadline) = 0;
  /// Watches the copies of later runs; returns their number of chunks. Called after prepare().
  virtual Result<uint64_t> watch(CopyWatch) { return invalid("the copies of this transport cannot be watched"); }
  /// Copies of later runs into memory of these files write the files. Called after prepare().
  virtual void copyThroughFiles(std::unique_ptr<const FileCopies>) {}
  /// All-reduce min over all processes of the run, each of which must call it.
  virtual Result<int64_t> allReduceMin(int64_t value, Deadline) { return value; }
  /// The sums, modulo 2^64, of the values of all processes of the run, each of which must call it with as many.
  virtual Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t> values, Deadline) { return values; }
  /// The device that has the bound memory; null: the host has it.
  virtual Device *device() { return nullptr; }
  /// The channel of a transport with one rank in each process. Null: the transport has none.
  virtual Channel *channel() { return nullptr; }
  /// Gives the channel to another transport; this one can only be destroyed then. No run has its messages in flight.
  virtual std::unique_ptr<Channel> takeChannel() { return nullptr; }
  /// For a device: enqueues a run on the caller's stream and returns.
  virtual Status enqueue(void *) { return invalid("enqueue needs device 'cuda': device 'cpu' has no streams"); }
  /// Bytes that a run moves, padding included.
  virtual uint64_t bytes() const = 0;
  virtual BytesBy bytesBy() const { return {bytes(), 0, 0, 0}; }
  /// For a device: zeroed device memory, which lives as long as the transport; null: use host memory.
  virtual Result<std::byte *> allocate(uint64_t) { return nullptr; }
  /// For a device: the stream on which hooks enqueue (Device::stream).
  virtual void *stream() const { return nullptr; }
};

/// The error of ranks with different plans; digests as Plan::digest().
Status planMismatch(uint32_t rank, const std::string &digest, uint32_t own, const std::string &ownDigest);

/// All ranks of the plan in this process: direct strided copies from source to target memory by `threads` threads (0:
/// one for each core).
std::unique_ptr<Transport> makeThreadsTransport(unsigned threads);

/// One rank of the plan in each process: the messages of the plan, over a channel. `shortcut`: a receiver that can map
/// the memory of a sender on its host copies the message out of it instead.
std::unique_ptr<Transport> makeMessageTransport(std::unique_ptr<Channel> channel, bool shortcut = true);

struct RecordedOptions {
  /// Local copies of a rank are messages to itself.
  bool selfMessages = false;
  /// The caller's hooks: the first and the last operation. Called once, in prepare().
  Call before, refresh;
};

/// All bound memory must be the device's. Without a communicator: all ranks of the plan on one device, by direct
/// copies. With one: the communicator's rank, by the messages of the plan.
std::unique_ptr<Transport> makeRecordedTransport(std::unique_ptr<Device> device,
                                                 std::unique_ptr<Communicator> communicator, RecordedOptions options);

} // namespace reshard
