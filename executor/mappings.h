// The memory mappings of this process: which of its memory others can map, and how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {

/// Equal for processes that see the same memory and the same process numbers.
uint64_t hostNumber();

class SharedMappings {
public:
  /// Reads what is mapped now.
  SharedMappings();

  /// A descriptor of the file that holds [begin, begin + bytes), and where; -1 where that is not one shared mapping of a file that can be reached.
  /// One that had to be opened is appended to `opened`.
  int file(const std::byte *begin, uint64_t bytes, uint64_t &offset, std::vector<int> &opened);

private:
  struct Area {
    uint64_t begin, end, offset;
    uint64_t device, inode;
    std::string name;
  };
  int descriptor(const Area &area, std::vector<int> &opened);

  std::vector<Area> areas_; // shared ones, ascending
  std::map<std::pair<uint64_t, uint64_t>, int> descriptors_; // (device, inode), of the process
};

} // namespace reshard
