// Folders that appear complete or not at all.
#pragma once

#include "tools/common.h"

#include <cstdint>
#include <filesystem>
#include <string>

namespace reshard::tools {

/// Ends a command with a message and an exit code.
struct Failure {
  int code;
  std::string message;
};

/// Throws where there is an error.
inline void throwOnError(const std::string &error, int code) {
  if (!error.empty())
    throw Failure{code, error};
}

/// Once, for the whole process: SIGINT and SIGTERM end it after the unfinished folder is gone, and so does a page of a
/// mapped file that cannot be read (SIGBUS: the file was made shorter), with an error that names the file and kFailure.
void watchSignals();

/// Whether `path` is `folder` or stands in it, by whatever names and links: an error text, empty where it does not.
std::string insideOf(const std::string &path, const std::string &folder);

/// A folder that is filled under another name and takes its own by rename; until then it goes with this object, and
/// when a signal ends the process (watchSignals). What a process of this host left that was killed is removed when the
/// folder is made again. One process makes it; others may fill it too. One at a time.
class NewFolder {
public:
  /// A number of this process and its host.
  static int64_t ownNumber();
  /// The name under which it is filled ends with `number`: the ownNumber() of the process that makes it. `make`: this
  /// one.
  NewFolder(const std::string &path, int64_t number, bool make);
  ~NewFolder();
  NewFolder(const NewFolder &) = delete;
  NewFolder &operator=(const NewFolder &) = delete;

  std::string temporary() const { return temporary_; }
  /// By the process that made it; elsewhere it does nothing.
  void commit();

private:
  std::filesystem::path path_, temporary_;
  const bool mine_;
  bool done_ = false;
  int lock_ = -1; // a descriptor of the folder, locked
};

} // namespace reshard::tools
