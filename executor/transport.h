// How the bytes of one process's ranks get from source to target memory. One implementation per file; executor.cpp
// chooses by name.
#pragma once

#include "executor/deadline.h"
#include "executor/load.h"
#include "kernels/convert_strided.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace reshard {

/// The memory of all buffers of one (endpoint, place), instance by instance; null where nothing is bound.
using PointerTable = std::vector<std::byte *>;

class ViewJobs;

/// One rank of this process, as a transport sees it.
struct LocalRank {
  uint32_t rank = 0;
  const schema::Segment *segment = nullptr;
  /// Per BufferRun of the segment: the bound memory of its first instance, further ones follow in the table.
  std::vector<std::byte *const *> runs;
  /// Per BufferRun: how its memory differs from what goes. Empty: not at all, anywhere.
  std::vector<kernels::StorageForm> forms;
  /// Per BufferRun, where it is a face: the matrices behind each instance.
  std::vector<std::vector<kernels::ViewBase>> viewBases;
  /// What is to be converted before and after all else.
  const ViewJobs *viewJobs = nullptr;
  /// The arena's beginning, where what comes in parts is gathered; null where the rank gathers nothing.
  std::byte *arena = nullptr;
  /// Bytes of the rank's arena that are of params with a transform, which no transport allocates.
  uint64_t transformed = 0;

  /// The memory of a buffer, or null where it is not bound.
  std::byte *pointer(uint32_t buffer) const;
  kernels::StorageForm form(uint32_t buffer) const;
  /// Null where the buffer is no face.
  const kernels::ViewBase *viewBase(uint32_t buffer) const;
};

/// The run that has a buffer, or as many as there are.
size_t bufferRunOf(const schema::Segment &segment, uint32_t buffer);

/// The forms of a segment's buffers, as its plan says.
std::vector<kernels::StorageForm> formsOf(const Plan &plan, const schema::Segment &segment);

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
  /// Whether it can move what is bound of a rank: an error text names the param whose memory is out of its reach.
  virtual std::string reach(const Plan &, const LocalRank &) const { return {}; }
  /// Called once, with everything bound and in reach; allocates all that run() needs. An error text, empty on success;
  /// `timedOut` says that the deadline passed.
  virtual std::string prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline,
                              bool &timedOut) = 0;
  /// Moves every byte; allocates nothing. `timedOut` says that the deadline passed.
  virtual std::string run(Deadline deadline, bool &timedOut) = 0;
  /// The least of what all processes of the run say; each calls it as often as the others.
  virtual std::string allReduceMin(int64_t mine, int64_t &minimum, Deadline, bool &) {
    minimum = mine;
    return {};
  }
  /// Of a device's: has a run done on a stream of the caller's, and returns.
  virtual std::string enqueue(void *) { return "its memory is the host's, which has no streams"; }
  /// Bytes that a run moves, padding included.
  virtual uint64_t bytes() const = 0;
  virtual BytesBy bytesBy() const { return {bytes(), 0, 0, 0}; }
  /// Of a device's: zeroed memory there, until the transport goes; null where the host's will do. An error text, empty
  /// on success.
  virtual std::string allocate(uint64_t, std::byte *&memory) {
    memory = nullptr;
    return {};
  }
  /// Of a device's, the stream that hooks enqueue on (Device::stream).
  virtual void *stream() const { return nullptr; }
};

/// Why ranks that should run one plan cannot go on; digests as Plan::digest().
std::string planMismatch(uint32_t rank, const std::string &digest, uint32_t own, const std::string &ownDigest);

/// All ranks of the plan in this process: direct strided copies from source to target memory by `threads` workers (0:
/// all cores).
std::unique_ptr<Transport> makeThreadsTransport(unsigned threads);

class Channel;
/// One rank of the plan in each process: messages over a wire, as compiled. `shortcut`: inside a host, where memory can
/// be shared, the receiver copies a message out of the sender's memory instead.
std::unique_ptr<Transport> makeMessageTransport(std::unique_ptr<Channel> channel, bool shortcut = true);

} // namespace reshard
