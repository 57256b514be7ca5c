// SPDX-License-Identifier: Apache-2.0
// How far the copies of a run inside this process are, and the copies that an earlier process has done already. Not
// part of the C API: reshard-exec shows the progress of a run, and resumes one.
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <functional>

struct reshard_executor;

namespace reshard {

class ChunkedCopies;

/// The first `done` of all copy chunks are done, in the order of the run, which is the same in every run of a plan with
/// one transport.
struct CopyProgress {
  uint64_t done = 0, chunks = 0;
  uint64_t bytesDone = 0, bytes = 0;
  const std::byte *next = nullptr; // target memory of the first chunk that is not done; null if all are done
};

struct CopyWatch {
  /// The first chunks, which an earlier run has done: the bound memory of targets has their bytes. Those that write
  /// other memory, for later chunks, are run again.
  uint64_t done = 0;
  /// Called by the thread that runs the plan: when a run begins, a few times a second, and when all copies are done.
  /// May be empty.
  std::function<void(const CopyProgress &)> at;
  /// Called by each thread after it has copied a chunk, of about 1 MiB. May be empty.
  std::function<void()> copied;
};

/// Sets the watch of all later runs of a prepared executor and returns the number of copy chunks of a run. Fails with
/// kind `invalid` before prepare, with more chunks done than there are, and for devices and pull mode, whose copies
/// cannot be watched.
Result<uint64_t> watchCopies(reshard_executor &executor, CopyWatch watch);

/// A watch and its state in a run, for transports.
class CopyReports {
public:
  explicit CopyReports(const ChunkedCopies &copies) : copies_(copies) {}

  /// Returns the number of copy chunks of a run. Fails if the watch says that more are done.
  Result<uint64_t> set(CopyWatch watch);
  /// Whether anyone wants to be told.
  bool wanted() const { return static_cast<bool>(watch_.at); }
  /// Whether a chunk is not to be run, since it is done.
  bool skips(size_t chunk) const;
  /// Reports what is done already.
  void beginRun();
  /// A thread has copied a chunk.
  void copied() const {
    if (watch_.copied)
      watch_.copied();
  }
  /// Whether it is time to report.
  bool due() const;
  /// The first `done` chunks are done.
  void report(size_t done);

private:
  const ChunkedCopies &copies_;
  CopyWatch watch_;
  double last_ = 0;    // time of the last report
  size_t counted_ = 0; // chunks whose bytes are in bytesDone_
  uint64_t bytesDone_ = 0;
};

} // namespace reshard
