// SPDX-License-Identifier: Apache-2.0
#include "tools/run/resident_memory.h"

#include <chrono>
#include <cstdio>
#include <malloc.h>
#include <unistd.h>

namespace reshard::tools {

using namespace verify;

uint64_t rssBytes() {
  unsigned long long total = 0, resident = 0;
  if (std::FILE *file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%llu %llu", &total, &resident) != 2)
      resident = 0;
    std::fclose(file);
  }
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

ResidentMemoryLimit::ResidentMemoryLimit(std::vector<const Memory *> files, uint64_t bytes)
    : files_(std::move(files)), bytes_(bytes) {
  if (bytes == 0)
    return;
  // Else each thread keeps freed buffers of up to 32 MiB for its next ones.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  thread_ = std::thread([this] { watch(); });
}

ResidentMemoryLimit::~ResidentMemoryLimit() {
  done_ = true;
  if (thread_.joinable())
    thread_.join();
}

void ResidentMemoryLimit::check() const {
  if (bytes_ > 0 && rssBytes() > bytes_ / 2)
    for (const Memory *memory : files_)
      memory->release();
}

void ResidentMemoryLimit::watch() const {
  while (!done_) {
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

} // namespace reshard::tools
