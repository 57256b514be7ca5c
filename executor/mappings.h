// The memory mappings of this process: which of its memory others can map, and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {

/// Equal for processes that see the same memory and the same process numbers.
uint64_t hostId();

/// Where memory stands in a file.
struct FileLocation {
  int file = -1;                  // a descriptor of the process, which may close it, and open another under its number
  uint64_t device = 0, inode = 0; // of the file that is meant
  uint64_t offset = 0;
};

/// A part of a file.
struct FileRange {
  uint64_t device = 0, inode = 0, offset = 0, bytes = 0;
};

class SharedMappings {
public:
  /// Reads what is mapped now.
  SharedMappings();

  /// Where [begin, begin + bytes) stands; file -1 where that is not one shared mapping of a file that can be reached. A
  /// descriptor that had to be opened is appended to `opened`.
  FileLocation find(const std::byte *begin, uint64_t bytes, std::vector<int> &opened);

  /// The parts of files that stand in [begin, end) by shared mappings, devices' left out.
  std::vector<FileRange> ranges(const std::byte *begin, const std::byte *end) const;

private:
  struct Area {
    uint64_t begin, end, offset;
    uint64_t device, inode;
    std::string name;
  };
  int descriptor(const Area &area, std::vector<int> &opened);

  std::vector<Area> areas_;                                  // shared ones, ascending
  std::map<std::pair<uint64_t, uint64_t>, int> descriptors_; // (device, inode), of the process
};

} // namespace reshard
