// SPDX-License-Identifier: Apache-2.0
// The input of a fuzzer as files in a folder that has nothing else.
#pragma once

#include "tests/lib/folder.h"

#include <cstdlib>
#include <fstream>
#include <string_view>
#include <unistd.h>

namespace reshard::tests {

/// An empty temporary folder. It becomes the current folder, so that the files that an input names do not exist.
inline const TemporaryFolder &fuzzFolder() {
  static const TemporaryFolder folder;
  static const bool entered = chdir(folder.path().c_str()) == 0;
  if (!entered)
    std::abort();
  return folder;
}

inline void put(const std::string &path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush())
    std::abort();
}

/// Whether a text could name a device or an existing file. Fuzzers that read the files of their input skip such texts.
inline bool namesExistingFiles(std::string_view text) {
  for (const char *absolute : {": /", "\"/", "'/", "- /", "../"})
    if (text.find(absolute) != std::string_view::npos)
      return true;
  return false;
}

inline std::string_view textOf(const uint8_t *data, size_t size) {
  return {reinterpret_cast<const char *>(data), size};
}

} // namespace reshard::tests
