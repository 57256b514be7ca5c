// SPDX-License-Identifier: Apache-2.0
// Copies into mapped files by system calls. A store to a page of a file that no process has touched costs a page fault;
// the kernel writes whole ranges several times as fast. Not part of the C API: reshard-exec does this.
#pragma once

#include "base/mapped_file.h"
#include "base/status.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

struct reshard_executor;

namespace reshard {

class FileCopies {
public:
  /// The length of the buffers through which bytes are copied: they fit into the second-level cache of common CPUs, and
  /// smaller ones need more system calls (docs/performance.md).
  static constexpr uint64_t kBufferBytes = 256 << 10;

  /// Opens the files again. Files beyond half of what this process may have open, and files that have been replaced,
  /// are left to their mappings. The mappings must live as long as this object. `synced`: the files will be
  /// synced, so that the device begins to write them at once.
  explicit FileCopies(const std::vector<const MappedFile *> &files, bool synced = true);
  ~FileCopies();
  FileCopies(const FileCopies &) = delete;
  FileCopies &operator=(const FileCopies &) = delete;

  /// A position in an open file.
  struct Position {
    int file;
    uint64_t offset;
  };
  /// The position of memory that lies in one of the open files.
  std::optional<Position> find(const std::byte *memory, uint64_t bytes) const;

  /// Copies memory to a position. If the memory lies in one of the open files, it is read by system calls too, through
  /// a buffer that each thread allocates when it first needs one; blocks that have the same offset in both files are
  /// shared if the file system can do so. Threads may call this at the same time.
  Status copy(const Position &to, const std::byte *from, uint64_t bytes) const;
  /// Writes memory to a position.
  static Status write(const Position &to, const std::byte *from, uint64_t bytes);
  /// Lets the device write a range while later ranges are copied, so that the sync at the end of the run is short. Only
  /// a hint: the sync reports errors. Shorter ranges than 128 KiB wait for it: the device would write their pages again
  /// for their neighbors.
  void beginWriting(const Position &to, uint64_t bytes) const;

private:
  struct Opened {
    const std::byte *data;
    uint64_t bytes;
    int file;
  };
  /// `mapped`: the memory of `from`.
  /// Lets the file system share the whole blocks of a range, which begins at a block, between both files: nothing is
  /// copied. Returns their bytes; 0 if it cannot.
  uint64_t shareBlocks(const Position &to, const Position &from, uint64_t bytes) const;
  static Status copyThroughBuffer(const Position &to, const Position &from, const std::byte *mapped, uint64_t bytes);

  std::vector<Opened> files_; // by address
  const bool synced_;
  mutable std::atomic<bool> sharesBlocks_ = true; // until a file system has refused to share blocks
};

/// Lets all later runs of a prepared executor write the long ranges of these files by system calls; `synced` as for
/// FileCopies. Only transports of device `cpu` do this; others ignore it.
Status copyThroughFiles(reshard_executor &executor, const std::vector<const MappedFile *> &files, bool synced = true);

} // namespace reshard
