// SPDX-License-Identifier: Apache-2.0
// The MAP_SHARED file mappings of this process, to find memory that other processes can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {

/// The position of memory in a file.
struct FileLocation {
  int file = -1;                  // a descriptor of its process, which may close it and reuse its number
  uint64_t device = 0, inode = 0; // identify the file, to detect that
  uint64_t offset = 0;
};

/// A range of a file.
struct FileRange {
  uint64_t device = 0, inode = 0, offset = 0, bytes = 0;
};

class SharedMappings {
public:
  /// Reads the current mappings.
  SharedMappings();

  /// The file position of [begin, begin + bytes); file -1 if that is not inside one shared mapping of a file that can
  /// be opened. A descriptor that had to be opened is appended to `opened`, and the caller must close it.
  FileLocation find(const std::byte *begin, uint64_t bytes, std::vector<int> &opened);

  /// The file ranges that are mapped shared in [begin, end), without devices.
  std::vector<FileRange> ranges(const std::byte *begin, const std::byte *end) const;

private:
  struct Area {
    uint64_t begin, end, offset;
    uint64_t device, inode;
    std::string name;
  };
  int descriptor(const Area &area, std::vector<int> &opened);

  std::vector<Area> areas_; // shared mappings, ascending
  std::map<std::pair<uint64_t, uint64_t>, int>
      descriptors_; // (device, inode) -> an open descriptor; -1: cannot be opened
};

} // namespace reshard
