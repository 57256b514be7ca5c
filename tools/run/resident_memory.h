// SPDX-License-Identifier: Apache-2.0
// Limits the resident memory of a process that maps files, for models larger than memory.
#pragma once

#include "tools/run/memory.h"

#include <atomic>
#include <thread>
#include <vector>

namespace reshard::tools {

/// The resident memory of this process now, in bytes.
uint64_t rssBytes();

/// Keeps the resident memory of this process below `bytes` (0: no limit) by releasing the pages of mapped files. The
/// contents remain in the files: the next access to a page reads it again. Threads that access files call check(). For
/// other accesses, a thread calls it a few hundred times a second while this object lives. With a limit, the process's
/// allocator returns large buffers to the system from now on.
class ResidentMemoryLimit {
public:
  ResidentMemoryLimit(std::vector<const Memory *> files, uint64_t bytes);
  ~ResidentMemoryLimit();
  ResidentMemoryLimit(const ResidentMemoryLimit &) = delete;
  ResidentMemoryLimit &operator=(const ResidentMemoryLimit &) = delete;

  /// Releases the files' pages if the process is at half of the limit: other threads access more before their next
  /// call. Takes microseconds if there is nothing to release. Any thread may call this, after about 1 MiB of accesses.
  void check() const;

private:
  void watch() const;

  const std::vector<const Memory *> files_;
  const uint64_t bytes_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

} // namespace reshard::tools
