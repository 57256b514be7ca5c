// SPDX-License-Identifier: Apache-2.0
// A temporary folder for tests and benchmarks in C++. Those in Python use FolderTest of commands.py.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>

namespace reshard::tests {

/// A folder with a unique name, removed with its contents by the destructor. The constructor throws
/// std::runtime_error if the folder cannot be created.
class TemporaryFolder {
public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "reshard-XXXXXX").string()) {
    if (!::mkdtemp(path_.data()))
      throw std::runtime_error("cannot create a folder like '" + path_ + "'");
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder &) = delete;
  TemporaryFolder &operator=(const TemporaryFolder &) = delete;

  const std::string &path() const { return path_; }
  /// The path of a file in the folder.
  std::string operator/(const std::string &name) const { return path_ + "/" + name; }
  /// The number of files and folders directly in the folder.
  size_t entries() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

private:
  std::string path_;
};

} // namespace reshard::tests
