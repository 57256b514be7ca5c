// SPDX-License-Identifier: Apache-2.0
// Files that are read by system calls into the reader's own memory. What was checked cannot change afterwards, and a
// file that becomes shorter is an error; a mapping would raise SIGBUS.
#pragma once

#include "base/mapped_file.h"
#include "base/status.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <utility>

namespace reshard {

/// An open regular file.
class InputFile {
public:
  /// A folder, a device or a FIFO is an error.
  static Result<InputFile> open(const std::string &path);
  InputFile(InputFile &&other) noexcept : file_(std::exchange(other.file_, -1)) { take(other); }
  InputFile &operator=(InputFile &&other) noexcept {
    std::swap(file_, other.file_);
    take(other);
    return *this;
  }
  ~InputFile();

  const std::string &path() const { return path_; }
  /// The file when it was opened, and its bytes then.
  const struct stat &status() const { return status_; }
  uint64_t bytes() const { return static_cast<uint64_t>(status_.st_size); }

  /// Reads bytes that the file had when it was opened.
  Status read(uint64_t begin, char *to, uint64_t bytes) const;
  Result<std::string> read(uint64_t begin, uint64_t bytes) const;

private:
  InputFile() = default;
  void take(InputFile &other) {
    path_ = std::move(other.path_);
    status_ = other.status_;
  }

  int file_ = -1;
  std::string path_;
  struct stat status_{};
};

/// An error if a file is not the one that was read, whose status was `read` then, or has changed in between.
Status checkSame(const struct stat &read, const MappedFile &mapped);

/// Whether a folder has an entry of this name: a file of any kind, also one that cannot be opened, as a link in a loop.
bool hasEntry(const std::string &path);

/// The whole of a regular file. A file of more than `most` bytes is an error.
Result<std::string> readWhole(const std::string &path, uint64_t most);

/// A part of a file. It reads at least a few KiB at a time.
class FilePart {
public:
  /// The part lies in the file, which must outlive this.
  FilePart(const InputFile &file, uint64_t begin, uint64_t bytes) : file_(file), begin_(begin), bytes_(bytes) {}

  uint64_t bytes() const { return bytes_; }
  /// Bytes of the part, from `at` on; fewer if it ends before. They are valid until the next call.
  Result<std::string_view> read(uint64_t at, uint64_t count);

private:
  const InputFile &file_;
  const uint64_t begin_, bytes_;
  std::string window_; // bytes that were read
  uint64_t windowAt_ = 0;
};

} // namespace reshard
