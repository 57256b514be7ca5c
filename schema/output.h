// Where an output of a command goes: what stands at a path decides whether it is replaced or written to.
#pragma once

#include <string>

namespace reshard::schema {

/// The place of an output.
struct Output {
  std::string path; // behind symbolic links: the file that is made, or replaced by a rename
  bool direct =
      false; // what stands there is no regular file (a device, a FIFO, /dev/stdout): it is written to, never replaced
};

/// What stands at a path, whether it exists or not.
Output outputAt(const std::string &path);

/// Copies all of an open file to a path that is written to directly. An error text, empty on success.
std::string writeThrough(int file, const std::string &path);

/// Whether two paths are one regular file, whatever their names.
bool sameFile(const std::string &one, const std::string &other);

} // namespace reshard::schema
