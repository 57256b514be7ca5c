// The params of an execution on a device: a mirror of memory of the host.
#pragma once

#include "executor/device.h"
#include "tools/memory.h"

namespace reshard::tools {

class DeviceMemory {
public:
  /// Memory of the device for all that `host` has; both must outlive this. An error text, empty on success.
  std::string mirror(const Plan &plan, const Memory &host, Device &device);
  /// The same places as the host's, with pointers of the device.
  const std::vector<MeshRankMemory> &rankMemories() const { return rankMemories_; }

  /// Copies everything. An error text, empty on success.
  std::string toDevice() const { return copy(true); }
  std::string toHost() const { return copy(false); }

private:
  struct BufferPair {
    std::byte *host, *there;
    uint64_t bytes;
  };
  std::string copy(bool toDevice) const;

  Device *device_ = nullptr;
  std::vector<MeshRankMemory> rankMemories_;
  std::vector<BufferPair> pairs_; // by instance
};

} // namespace reshard::tools
