// What a backend gives to the recorded transport: a device that is told once what a refit does, and then does it again
// and again. The module of device `cuda` is libreshard_cuda.so (executor/module.h).
#pragma once

#include "executor/deadline.h"
#include "kernels/conversion_table.h"
#include "kernels/copy_table.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace reshard {

class Communicator;

/// One end of a chunk of a message. Those of one pair of ranks meet in their order.
struct P2pOp {
  bool send;
  uint32_t peer;
  std::byte *memory;
  uint64_t bytes;
  uint32_t message, round; // these and what follows are for error texts
  uint64_t chunk, chunks;
};

/// Enqueues on the device's stream what is to be done there; an error text, empty on success.
using Call = std::function<std::string()>;

/// One after the other: copies, what changes on its way, and copies of what was changed. Within each there is no order.
struct Tables {
  kernels::CopyTable copies;
  kernels::ConversionTable conversions;
  kernels::CopyTable rest;
  bool empty() const { return copies.empty() && conversions.empty() && rest.empty(); }
  /// Bytes that go into targets.
  uint64_t bytes() const { return copies.bytes() + conversions.bytes(); }
};

/// One group of sends and receives, and a launch that has nothing to do with them, at the same time.
struct P2pBatch {
  std::vector<P2pOp> ops;
  Tables concurrent; // may be empty
};

/// A part of a refit: tables, or one group, or what the caller enqueues.
using Operation = std::variant<Tables, P2pBatch, Call>;

/// All error texts are empty on success.
class Device {
public:
  virtual ~Device() = default;

  virtual int number() const = 0;
  /// Zeroed memory of the device, 256-byte aligned, until the device goes.
  virtual std::string allocate(uint64_t bytes, std::byte *&memory) = 0;
  /// Copies between memory of the host and the device, in either direction; waits.
  virtual std::string copy(std::byte *target, const std::byte *source, uint64_t bytes) = 0;
  /// Whether the device can read and write this memory.
  virtual std::string reach(const std::byte *memory) = 0;

  /// Records operations, none of which begins before the one before it is done; once. Makes each call then, and never
  /// again. `group` carries the transfers and must live as long as the device; null where there are none. `timedOut`
  /// says that the deadline passed while ranks met.
  virtual std::string record(const std::vector<Operation> &operations, Communicator *communicator,
                             const Deadline &deadline, bool &timedOut) = 0;
  /// Begins to do what was recorded, on the device's stream. Allocates nothing.
  virtual std::string replay() = 0;
  /// Enqueues what was recorded on a stream of the caller's, or adds it to the graph that is being captured there.
  /// Nobody asks done() of it.
  virtual std::string enqueue(void *stream) = 0;
  /// Whether all of it is done.
  virtual std::string done(bool &done) = 0;
  /// The last operation that is known to have begun.
  virtual size_t begun() const = 0;
  /// A run failed: nothing will be replayed any more, and what is on its way is not waited for, not even at the end.
  /// Before Group::abandon, which ends it, and which waits until nothing that was recorded is left.
  virtual void abandon() = 0;
  /// What a call enqueues on: a cudaStream_t.
  virtual void *stream() const = 0;
};

constexpr uint32_t kDeviceVersion = 3;
/// What a module exports as `reshard_open_device`: a device by its number, modulo how many there are (-1: the caller's
/// current one), or null and an error text of at most `room` bytes.
using OpenDevice = Device *(*)(int number, char *error, size_t room);

/// Loads the module of a device and opens it. "no GPU: …" where module, driver or device are missing.
std::string openDevice(const std::string &name, int number, std::unique_ptr<Device> &device);

} // namespace reshard
