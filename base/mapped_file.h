// SPDX-License-Identifier: Apache-2.0
// Files mapped into memory.
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <vector>

namespace reshard {

/// A whole regular file, mapped for reading, or for reading and writing. The destructor unmaps it. Other processes can
/// map the same memory (MAP_SHARED).
class MappedFile {
public:
  enum class Access { read, write };

  MappedFile() = default;
  MappedFile(MappedFile &&other) noexcept { swap(other); }
  MappedFile &operator=(MappedFile &&other) noexcept {
    swap(other);
    return *this;
  }
  ~MappedFile();

  /// An empty file has no data. A folder, a device or a FIFO is an error.
  static Result<MappedFile> open(const std::string &path, Access access = Access::read);
  /// Bytes of a new file, from `offset` on.
  struct Part {
    uint64_t offset;
    std::string_view bytes;
  };
  /// Creates a file of `bytes` bytes, more than 0, and maps it for writing. Bytes outside `parts` are zero. A file that
  /// exists is an error. A full disk is an error here; a later write to the mapping would raise SIGBUS.
  static Result<MappedFile> create(const std::string &path, uint64_t bytes, const std::vector<Part> &parts = {});

  const std::byte *data() const { return data_; }
  /// Writable if the file was opened for writing.
  std::byte *data() { return data_; }
  size_t bytes() const { return bytes_; }

  /// Whether the mapping is for writing too.
  bool writable() const { return writable_; }

  /// The path given to open() or create(), and the file then.
  const std::string &path() const { return path_; }
  const struct stat &status() const { return status_; }

  /// Releases the file's pages from memory. Written data stays in the file; the next access reads it again. Any thread
  /// may call this at any time.
  void release() const;
  /// An error if the size or modification time of a file changed since open(). One that is mapped for writing may
  /// change.
  Status unchanged() const;

private:
  void swap(MappedFile &other) noexcept;

  std::byte *data_ = nullptr;
  size_t bytes_ = 0;
  bool writable_ = false;
  std::string path_;
  struct stat status_{};
};

} // namespace reshard
