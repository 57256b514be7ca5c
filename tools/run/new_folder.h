// SPDX-License-Identifier: Apache-2.0
// Creates folders atomically: they appear only when they are complete.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace reshard::tools {

/// Installs signal handlers for the process, once. SIGINT and SIGTERM remove the unfinished folder and then end the
/// process. SIGBUS, which an unreadable page of a mapped file raises (of a truncated file, for example), does the same,
/// with kFailure and an error of `command` that names the file.
void watchSignals(const char *command = "reshard-exec");

/// An error if `path` is `folder` or lies inside it, also through links.
Status checkOutside(const std::string &path, const std::string &folder);

/// An error if the output file of `option` exists and is the file `storage`, or lies in the folder `storage`, of the
/// endpoint `owner`.
Status checkNotStored(const char *option, const std::string &output, const std::string &storage,
                      const std::string &owner);

/// The name of a journal in an unfinished folder (CopyJournal), without the rank of its process. A folder that has one
/// can be continued.
constexpr const char *kJournalPrefix = ".reshard-journal-";

/// A folder that is filled under a temporary name and renamed when complete. Until then, it is removed with this
/// object, or when a signal ends the process (watchSignals). Temporary folders of killed processes of this host are
/// removed when the same folder is created again. One process creates the folder; others may fill it too. A process may
/// have one such object at a time.
class NewFolder {
public:
  /// A number that identifies this process and its host.
  static int64_t ownNumber();
  /// `number`: the ownNumber() of the creating process, part of the temporary name. `make`: this process creates the
  /// folder. `resume`: it takes over the temporary folder of a process of this host that has ended, if that has a
  /// journal. An error if the process still runs, if there are several such folders, or one of another host; `failed`
  /// if that folder cannot be renamed, `invalid` otherwise.
  static Result<std::unique_ptr<NewFolder>> open(const std::string &path, int64_t number, bool make,
                                                 bool resume = false);
  ~NewFolder();
  NewFolder(const NewFolder &) = delete;
  NewFolder &operator=(const NewFolder &) = delete;

  std::string temporary() const { return temporary_; }
  std::string path() const { return path_; }
  /// Whether it is the folder of an earlier process. False in processes that did not create it.
  bool resumed() const { return resumed_; }
  /// From now on the unfinished folder is kept when this object or the process ends; a resumed one always is.
  void keep();
  /// Undoes keep().
  void discard();
  /// Removes the journals and renames the folder to its final name. Does nothing in processes that did not create it.
  Status commit();

private:
  NewFolder() = default;
  Status make(const std::string &host, bool resume);
  Status create();
  Result<bool> takeOver(const std::string &host);

  std::filesystem::path path_, temporary_;
  bool mine_ = false; // this process has created it or taken it over
  bool done_ = false, kept_ = false, resumed_ = false;
  int lock_ = -1; // the locked descriptor of the folder
};

} // namespace reshard::tools
