// SPDX-License-Identifier: Apache-2.0
// Errors of system calls; calls that are repeated after a signal, or until all bytes are written or read.
#pragma once

#include "base/status.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unistd.h>

namespace reshard {

/// "cannot ACTION 'PATH': " and the reason that errno gives.
inline Status systemError(const char *action, const std::string &path) {
  return failed("cannot " + std::string(action) + " '" + path + "': " + std::strerror(errno));
}

/// The result of a call that returns -1 for an error, repeated while a signal interrupts it. Not for close(), which
/// closes the file in any case.
template <class Call> auto uninterrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR)
    result = call();
  return result;
}

/// Writes bytes to a file from `offset` on. False for an error, which is in errno.
inline bool writeAll(int file, const void *data, size_t bytes, uint64_t offset) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t some = uninterrupted([&] {
      return ::pwrite(file, static_cast<const char *>(data) + done, bytes - done, static_cast<off_t>(offset + done));
    });
    if (some == 0)
      errno = EIO;
    if (some <= 0)
      return false;
    done += static_cast<size_t>(some);
  }
  return true;
}

/// Reads bytes of a file from `offset` on. Returns how many, fewer than `bytes` only at the end of the file; -1 for an
/// error, which is in errno.
inline ssize_t readAll(int file, void *data, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t some = uninterrupted([&] {
      return ::pread(file, static_cast<char *>(data) + done, bytes - done, static_cast<off_t>(offset + done));
    });
    if (some < 0)
      return -1;
    if (some == 0)
      break;
    done += static_cast<size_t>(some);
  }
  return static_cast<ssize_t>(done);
}

} // namespace reshard
