// SPDX-License-Identifier: Apache-2.0
// The journal of a run that writes files: which of its copies are on the device, so that a later run continues there.
#pragma once

#include "base/status.h"
#include "tools/run/memory.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace reshard::tools {

/// A file that a run reads, as it was then.
struct JournalFile {
  std::string path;
  uint64_t bytes = 0;
  int64_t modified = 0; // nanoseconds since 1970
};

/// The run that a journal belongs to. Only an equal run continues it.
struct JournalRun {
  std::string plan, transport;                // the plan's digest
  uint32_t rank = 0;                          // this process's
  std::map<std::string, std::string> options; // by name; only those that determine the written files
  std::vector<JournalFile> files;
  std::vector<std::string> written; // the files and folders in the unfinished folder
};

/// The files of `memory`.
std::vector<JournalFile> journalFiles(const Memory &memory);

/// What an unfinished folder has besides journals, sorted. What is neither a file nor a folder, as a link, has an
/// addition to its name.
Result<std::vector<std::string>> entriesOf(const std::string &folder);

/// The first `done` of a run's copy chunks, which move `bytes` bytes.
struct JournalRecord {
  uint64_t done = 0, bytes = 0;
};

/// A line for each record: the XXH3-64 of its JSON text, a space, the text. The first line is the run. A last line
/// without its end is not a record: the process or the machine stopped while it was written. A journal has its first
/// line from the moment when it has its name.
class CopyJournal {
public:
  /// Creates the journal `path` of a run in the unfinished folder `folder`. Everything in the folder is on its device
  /// when this returns.
  static Result<std::unique_ptr<CopyJournal>> create(const std::string &path, const std::string &folder,
                                                     const JournalRun &run);
  /// Opens the journal that an earlier run left. Fails if it is of another run, if a file has changed since, if the
  /// folder has other files than the run made, or if a record is damaged.
  static Result<std::unique_ptr<CopyJournal>> open(const std::string &path, const std::string &folder,
                                                   const JournalRun &run);
  ~CopyJournal();
  CopyJournal(const CopyJournal &) = delete;
  CopyJournal &operator=(const CopyJournal &) = delete;

  /// The last record when the journal was opened.
  const JournalRecord &found() const { return found_; }
  /// These copies are done. A thread writes the files of the folder to their device, and then a record.
  void add(const JournalRecord &record);
  /// Waits until the last record is on the device. Returns the first error of the thread.
  Status finish();

private:
  CopyJournal(std::string path, std::string folder) : path_(std::move(path)), folder_(std::move(folder)) {}
  Status openFile(int flags);
  Status append(const std::string &json);
  Status read(const JournalRun &run);
  void begin();
  void work();

  std::string path_;
  const std::string folder_;
  int file_ = -1;
  uint64_t end_ = 0; // after the valid lines
  JournalRecord found_, written_, next_;
  Status status_; // the thread's first error
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

} // namespace reshard::tools
