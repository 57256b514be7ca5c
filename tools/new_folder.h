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
inline void need(const std::string &error, int code) {
  if (!error.empty())
    throw Failure{code, error};
}

/// A folder that is filled under another name and takes its own by rename; until then it goes with this object, and when SIGINT or SIGTERM ends the
/// process. One process makes it; others may fill it too. One at a time.
class NewFolder {
public:
  /// The name under which it is filled ends with `number`. `make`: by this process.
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
};

} // namespace reshard::tools
