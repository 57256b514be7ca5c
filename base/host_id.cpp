// SPDX-License-Identifier: Apache-2.0
#include "base/host_id.h"

#include "base/hash.h"

#include <fstream>
#include <string>
#include <unistd.h>

namespace reshard {

uint64_t hostId() {
  // The host name, since containers and tests share a kernel; the boot id; the pid namespace.
  std::string text(256, '\0');
  gethostname(text.data(), text.size() - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char space[64] = "";
  [[maybe_unused]] const auto length = readlink("/proc/self/ns/pid", space, sizeof space - 1);
  text += boot + space;
  return hashOf(text);
}

} // namespace reshard
