// SPDX-License-Identifier: Apache-2.0
#include "tools/run/device_memory.h"

#include "base/text.h"

#include <algorithm>

namespace reshard::tools {

using namespace verify;

Status DeviceMemory::mirror(const Plan &plan, const Memory &host, Device &device) {
  constexpr uint64_t kAlignment = 256;
  device_ = &device;
  rankMemories_ = host.rankMemories();
  for (MeshRankMemory &rankMemory : rankMemories_) {
    const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(rankMemory.endpoint);
    const size_t first = pairs_.size();
    uint64_t total = 0;
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
      for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, rankMemory.meshRank))
        if (std::byte *at = rankMemory.params[p][instance.instance]) {
          pairs_.push_back({at, nullptr, static_cast<uint64_t>(instance.bytes)});
          total += (pairs_.back().bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
    std::byte *next = nullptr;
    if (pairs_.size() > first) { // empty params need an address too
      const Result<std::byte *> memory = device.allocate(std::max(total, kAlignment));
      if (!memory.ok())
        return Status(memory.status())
            .withPrefix("cannot allocate " + humanBytes(static_cast<double>(total)) + " of device memory: ");
      next = *memory;
    }
    size_t pair = first;
    for (auto &instances : rankMemory.params)
      for (std::byte *&at : instances)
        if (at) {
          pairs_[pair].there = at = next;
          next += (pairs_[pair++].bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
  }
  return {};
}

Status DeviceMemory::copy(bool toDevice) const {
  for (const BufferPair &pair : pairs_)
    if (pair.bytes > 0)
      if (Status status = toDevice ? device_->copy(pair.there, pair.host, pair.bytes)
                                   : device_->copy(pair.host, pair.there, pair.bytes);
          !status.ok())
        return status;
  return {};
}

} // namespace reshard::tools
