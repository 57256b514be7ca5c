// SPDX-License-Identifier: Apache-2.0
#include "executor/memory/mappings.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

namespace reshard {

SharedMappings::SharedMappings() {
  if (std::FILE *maps = std::fopen("/proc/self/maps", "re")) {
    char line[5000];
    while (std::fgets(line, sizeof line, maps)) {
      Area area;
      char permissions[5];
      unsigned major = 0, minor = 0;
      int name = 0;
      if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &area.begin, &area.end,
                      permissions, &area.offset, &major, &minor, &area.inode, &name) < 7 ||
          permissions[3] != 's' || area.inode == 0)
        continue;
      area.device = makedev(major, minor);
      area.name = line + name;
      if (!area.name.empty() && area.name.back() == '\n')
        area.name.pop_back();
      areas_.push_back(std::move(area));
    }
    std::fclose(maps);
  }
  if (areas_.empty())
    return;
  if (DIR *folder = opendir("/proc/self/fd")) {
    const int directory = dirfd(folder);
    while (const dirent *entry = readdir(folder)) {
      struct stat status;
      const int number = std::atoi(entry->d_name);
      // fstatat by name, not fstat: other threads may close the descriptor meanwhile.
      if (entry->d_name[0] != '.' && number != directory && directory >= 0 &&
          fstatat(directory, entry->d_name, &status, 0) == 0 && S_ISREG(status.st_mode))
        descriptors_.try_emplace({status.st_dev, status.st_ino}, number);
    }
    closedir(folder);
  }
}

FileLocation SharedMappings::find(const std::byte *begin, uint64_t bytes, std::vector<int> &opened) {
  const auto at = reinterpret_cast<uint64_t>(begin);
  auto area =
      std::upper_bound(areas_.begin(), areas_.end(), at, [](uint64_t a, const Area &other) { return a < other.begin; });
  if (area == areas_.begin())
    return {};
  --area;
  if (area->end < at + bytes)
    return {};
  return {descriptor(*area, opened), area->device, area->inode, area->offset + (at - area->begin)};
}

std::vector<FileRange> SharedMappings::ranges(const std::byte *begin, const std::byte *end) const {
  std::vector<FileRange> result;
  const auto from = reinterpret_cast<uint64_t>(begin), to = reinterpret_cast<uint64_t>(end);
  auto area =
      std::upper_bound(areas_.begin(), areas_.end(), from, [](uint64_t a, const Area &other) { return a < other.end; });
  for (; area != areas_.end() && area->begin < to; ++area) {
    // Offsets in devices have no common meaning, and anonymous inodes of the kernel may be shared by unrelated files.
    const std::string &name = area->name;
    const bool memory =
        name.starts_with("/dev/shm/") || name.starts_with("/dev/hugepages/") || name.starts_with("/dev/zero (deleted)");
    if ((name.starts_with("/dev/") && !memory) || name.starts_with("anon_inode:"))
      continue;
    const uint64_t first = std::max(from, area->begin), last = std::min(to, area->end);
    result.push_back({area->device, area->inode, area->offset + (first - area->begin), last - first});
  }
  return result;
}

int SharedMappings::descriptor(const Area &area, std::vector<int> &opened) {
  if (const auto known = descriptors_.find({area.device, area.inode}); known != descriptors_.end())
    return known->second;
  int number = open(area.name.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (number >= 0 && (fstat(number, &status) != 0 || status.st_dev != area.device || status.st_ino != area.inode)) {
    close(number); // the name now belongs to another file
    number = -1;
  }
  if (number >= 0)
    opened.push_back(number);
  descriptors_[{area.device, area.inode}] = number;
  return number;
}

} // namespace reshard
