// SPDX-License-Identifier: Apache-2.0
// Device memory for the params of an execution, with copies to and from host memory.
#pragma once

#include "executor/interfaces/device.h"
#include "tools/run/memory.h"

namespace reshard::tools {

class DeviceMemory {
public:
  /// Allocates device memory for each buffer of `host`. Both arguments must outlive this.
  Status mirror(const Plan &plan, const Memory &host, Device &device);
  /// The mesh ranks of `host`, with device pointers.
  const std::vector<verify::MeshRankMemory> &rankMemories() const { return rankMemories_; }

  /// Copies all buffers.
  Status toDevice() const { return copy(true); }
  Status toHost() const { return copy(false); }

private:
  struct BufferPair {
    std::byte *host, *there;
    uint64_t bytes;
  };
  Status copy(bool toDevice) const;

  Device *device_ = nullptr;
  std::vector<verify::MeshRankMemory> rankMemories_;
  std::vector<BufferPair> pairs_; // by instance
};

} // namespace reshard::tools
