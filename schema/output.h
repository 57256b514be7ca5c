// The destination of a command's output: regular files are replaced, devices and FIFOs are written to.
#pragma once

#include "support/status.h"

#include <string>

namespace reshard::schema {

/// The destination of an output.
struct Output {
  std::string path;    // with symbolic links resolved: the file to create, or to replace by a rename
  bool direct = false; // not a regular file (a device, a FIFO, /dev/stdout): write to it, do not replace it
};

/// The destination for an output path, whether it exists or not.
Output outputAt(const std::string &path);

/// Copies an open file to a path with Output::direct.
Status writeThrough(int file, const std::string &path);

/// Whether two paths name the same existing regular file.
bool sameFile(const std::string &one, const std::string &other);

} // namespace reshard::schema
