// Models larger than memory: what of the mapped files stands in memory is kept below a limit.
#pragma once

#include "tools/memory.h"

#include <atomic>
#include <thread>
#include <vector>

namespace reshard::tools {

/// The bytes of this process that are resident now.
uint64_t rssBytes();

/// While it lives, a thread looks at this process's resident memory a few hundred times a second and unmaps the pages
/// of the files once they make it larger than `bytes` (0: no limit). Their contents stay in the files: reading or
/// writing a page again brings it back.
class FootprintLimit {
public:
  FootprintLimit(std::vector<const Memory *> files, uint64_t bytes);
  ~FootprintLimit();
  FootprintLimit(const FootprintLimit &) = delete;
  FootprintLimit &operator=(const FootprintLimit &) = delete;

private:
  void watch(uint64_t bytes);

  const std::vector<const Memory *> files_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

} // namespace reshard::tools
