// SPDX-License-Identifier: Apache-2.0
// Copies into mapped files by system calls. A store to a page of a file that no process has touched costs a page fault;
// the kernel writes whole ranges several times as fast, and copies between files without the process's memory. Not part
// of the C API: reshard-exec does this.
#pragma once

#include "support/status.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

struct reshard_executor;

namespace reshard {

/// Memory that is a shared mapping of a file from its first byte on. The descriptor must stay open while copies run.
struct MappedMemory {
  const std::byte *data;
  uint64_t bytes;
  int file;
};

class FileCopies {
public:
  explicit FileCopies(std::vector<MappedMemory> files);

  /// A byte of a file.
  struct Place {
    int file;
    uint64_t offset;
  };
  /// The place of memory that lies in one of the files.
  std::optional<Place> find(const std::byte *memory, uint64_t bytes) const;

  /// Copies memory to a place; if it lies in one of the files, from file to file. Threads may call this at the same
  /// time.
  Status copy(const Place &to, const std::byte *from, uint64_t bytes) const;
  /// Writes memory to a place.
  static Status write(const Place &to, const std::byte *from, uint64_t bytes);

private:
  std::vector<MappedMemory> files_; // by address
};

/// Lets all later runs of a prepared executor copy into memory that lies in these files with their descriptors, where
/// the target of a copy is a whole range. Only transports of device `cpu` do this; others ignore it.
Status copyThroughFiles(reshard_executor &executor, std::vector<MappedMemory> files);

} // namespace reshard
