// SPDX-License-Identifier: Apache-2.0
// Limits the resident memory of a process that maps files, for models larger than memory.
#pragma once

#include "analysis/files/memory.h"

#include <atomic>
#include <thread>
#include <vector>

namespace reshard::analysis {

/// The resident memory of this process now, in bytes.
uint64_t rssBytes();

/// While this object lives, a thread checks the resident memory of this process a few hundred times a second and
/// releases the pages of the files when it approaches `bytes` (0: no limit). The contents remain in the files: the next
/// access to a page reads it again.
class ResidentMemoryLimit {
public:
  ResidentMemoryLimit(std::vector<const Memory *> files, uint64_t bytes);
  ~ResidentMemoryLimit();
  ResidentMemoryLimit(const ResidentMemoryLimit &) = delete;
  ResidentMemoryLimit &operator=(const ResidentMemoryLimit &) = delete;

private:
  void watch(uint64_t bytes);

  const std::vector<const Memory *> files_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

} // namespace reshard::analysis
