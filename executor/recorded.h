// Transports of a device: what a run does is recorded in prepare() and replayed by run().
#pragma once

#include "executor/communicator.h"
#include "executor/transport.h"

namespace reshard {

struct RecordedOptions {
  /// What a rank copies within itself goes as messages to itself.
  bool selfMessages = false;
  /// What comes first, and last: the caller's hooks. Called once, in prepare().
  Call before, refresh;
};

/// All bound memory is the device's. Without a group: all ranks of the plan on one device, by direct copies. With one:
/// the group's rank, by messages as compiled.
std::unique_ptr<Transport> makeRecordedTransport(std::unique_ptr<Device> device,
                                                 std::unique_ptr<Communicator> communicator, RecordedOptions options);

} // namespace reshard
