// SPDX-License-Identifier: Apache-2.0
// The transports of a device: prepare() records the operations of a run, run() replays them.
#pragma once

#include "executor/interfaces/communicator.h"
#include "executor/transports/transport.h"

namespace reshard {

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
