// SPDX-License-Identifier: Apache-2.0
// The interface of a backend of the recorded transport: a device that records the operations of a refit once and
// replays them in each run. The module of device `cuda` is libreshard_cuda.so (executor/interfaces/module.cpp).
#pragma once

#include "base/deadline.h"
#include "base/status.h"
#include "kernels/gpu/conversion_table.h"
#include "kernels/gpu/copy_table.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace reshard {

class Communicator;

/// The send or the receive of one chunk of a message. The operations of a pair of ranks match in their order.
struct P2pOp {
  bool send;
  uint32_t peer;
  std::byte *memory;
  uint64_t bytes;
  uint32_t message, round; // from here on: for error texts
  uint64_t chunk, chunks;
};

/// Enqueues work on the device's stream.
using Call = std::function<Status()>;

/// Three tables that run one after the other: copies, conversions, copies of converted blocks (SplitBlocks in
/// packing.h). The entries of one table are unordered.
struct Tables {
  kernels::CopyTable copies;
  kernels::ConversionTable conversions;
  kernels::CopyTable rest;
  bool empty() const { return copies.empty() && conversions.empty() && rest.empty(); }
  /// Bytes written to targets.
  uint64_t bytes() const { return copies.bytes() + conversions.bytes(); }
};

/// A group of sends and receives, and tables without shared bytes that run at the same time.
struct P2pBatch {
  std::vector<P2pOp> ops;
  Tables concurrent; // may be empty
};

/// A part of a refit: tables, a batch of sends and receives, or work that the caller enqueues.
using Operation = std::variant<Tables, P2pBatch, Call>;

class Device {
public:
  virtual ~Device() = default;

  virtual int number() const = 0;
  /// Zeroed memory of the device, 256-byte aligned, which lives as long as the device.
  virtual Result<std::byte *> allocate(uint64_t bytes) = 0;
  /// Copies between host and device, in either direction. Returns when the copy is done.
  virtual Status copy(std::byte *target, const std::byte *source, uint64_t bytes) = 0;
  /// Fails if the device cannot read and write this memory.
  virtual Status reach(const std::byte *memory) = 0;

  /// Adds the digests of memory of the device to `sums`, two for each digest. Returns when they are computed.
  virtual Status digest(const kernels::DigestTable &table, std::vector<uint64_t> &sums) = 0;

  /// Records operations, which run one after the other. May be called once. Makes each Call now and not again.
  /// `communicator` sends and receives, and must outlive the device; null if there are no messages. Ranks connect until
  /// the deadline.
  virtual Status record(const std::vector<Operation> &operations, Communicator *communicator,
                        const Deadline &deadline) = 0;
  /// Starts the recorded operations on the device's stream. Allocates nothing.
  virtual Status replay() = 0;
  /// Enqueues the recorded operations on the caller's stream, or adds them to the graph that is captured there. done()
  /// does not report on them.
  virtual Status enqueue(void *stream) = 0;
  /// Whether the last replay() is complete.
  virtual Result<bool> done() = 0;
  /// The number of the last operation that is known to have started.
  virtual size_t begun() const = 0;
  /// A run failed: nothing is replayed from here on, and the destructor does not wait for pending work. Must be called
  /// before Communicator::abandon, which aborts that work and needs the recorded operations to be released.
  virtual void abandon() = 0;
  /// The cudaStream_t on which a Call enqueues.
  virtual void *stream() const = 0;
};

constexpr uint32_t kDeviceVersion = 6;
/// The function that a module exports as `reshard_open_device`. Returns device `number` modulo the number of devices
/// (-1: the caller's current device), or null and sets `error`.
using OpenDevice = Device *(*)(int number, Status &error);

/// Loads the module of a device and opens it. The error, "no GPU: …", states whether the module, the driver or the
/// device is missing.
Result<std::unique_ptr<Device>> openDevice(const std::string &name, int number);

} // namespace reshard
