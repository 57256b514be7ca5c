// SPDX-License-Identifier: Apache-2.0
// Output files: regular files are replaced as a whole, devices and FIFOs are written to. syncFolder() waits for the
// device.
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace reshard {

/// The destination of an output.
struct Output {
  std::string path;    // with symbolic links resolved: the file to create, or to replace by a rename
  bool direct = false; // not a regular file (a device, a FIFO, /dev/stdout): write to it, do not replace it
};

/// The destination for an output path, whether it exists or not.
Output outputAt(const std::string &path);

/// Whether two paths name the same existing regular file.
bool sameFile(const std::string &one, const std::string &other);

/// A file that other processes see only when it is complete: it has no name, or a temporary one in the same folder
/// where the file system requires one, until commit() gives it its own. A symbolic link at the path is kept, and the
/// file that it names is replaced. If the path is not a regular file, commit() copies the bytes to it.
class AtomicFile {
public:
  AtomicFile() = default;
  AtomicFile(AtomicFile &&other) noexcept { swap(other); }
  AtomicFile &operator=(AtomicFile &&other) noexcept {
    swap(other);
    return *this;
  }
  /// Removes the temporary file unless commit() succeeded.
  ~AtomicFile();

  static Result<AtomicFile> create(const std::string &path);
  /// Whether it was created and neither committed nor abandoned since.
  bool open() const { return file_ >= 0; }
  /// Writes at an offset from the beginning of the file. After an error, the file is abandoned.
  Status write(const void *data, size_t bytes, uint64_t offset);
  /// Sets the length. The result is a path at which the file can be read until it is committed or abandoned.
  Result<std::string> complete(uint64_t bytes);
  /// Gives the file its length and its name.
  Status commit(uint64_t bytes);
  /// Removes the temporary file.
  void abandon();

private:
  void swap(AtomicFile &other) noexcept;
  Status failure(const char *action);
  /// Calls `make` with temporary names until one is free, and keeps it. Returns its result; -1 with errno: an error.
  int withTemporaryName(const std::function<int(const char *)> &make);

  std::string path_; // as given
  Output output_;
  std::string temporary_; // empty: it has no name
  int file_ = -1;
};

/// Writes a whole file with AtomicFile.
Status writeFile(const std::string &path, std::string_view text);

/// Waits until everything in a folder is on its device: all files, also what was written to mappings of them, and all
/// folders. An error of the device or of a full file system that occurs only now is returned; it names the file. A file
/// that another process renames or removes meanwhile is left out.
Status syncFolder(const std::string &folder);
/// The same for one file, or for the names in one folder.
Status syncFile(const std::string &path);

} // namespace reshard
