// SPDX-License-Identifier: Apache-2.0
// Copies into mapped files by system calls. A store to a page of a file that no process has touched costs a page fault;
// the kernel writes whole ranges several times as fast, and copies between files without the process's memory. Not part
// of the C API: reshard-exec does this.
#pragma once

#include "support/mapped_file.h"
#include "support/status.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

struct reshard_executor;

namespace reshard {

class FileCopies {
public:
  /// Opens the files again. Those beyond half of the files that this process may have open, and those that have been
  /// replaced, are left to their mappings. The mappings must live as long as this object. `synced`: the files will be
  /// synced, so that the device begins to write them at once.
  explicit FileCopies(const std::vector<const MappedFile *> &files, bool synced = true);
  ~FileCopies();
  FileCopies(const FileCopies &) = delete;
  FileCopies &operator=(const FileCopies &) = delete;

  /// A byte of a file.
  struct Place {
    int file;
    uint64_t offset;
  };
  /// The place of memory that lies in one of the open files.
  std::optional<Place> find(const std::byte *memory, uint64_t bytes) const;

  /// Copies memory to a place; if it lies in one of the open files, from file to file. Threads may call this at the
  /// same time.
  Status copy(const Place &to, const std::byte *from, uint64_t bytes) const;
  /// Writes memory to a place.
  Status write(const Place &to, const std::byte *from, uint64_t bytes) const;

private:
  struct Opened {
    const std::byte *data;
    uint64_t bytes;
    int file;
  };
  void beginWriting(const Place &to, uint64_t bytes) const;

  std::vector<Opened> files_; // by address
  const bool synced_;
};

/// Lets all later runs of a prepared executor write the long ranges of these files by system calls; `synced` as for
/// FileCopies. Only transports of device `cpu` do this; others ignore it.
Status copyThroughFiles(reshard_executor &executor, const std::vector<const MappedFile *> &files, bool synced = true);

} // namespace reshard
