// SPDX-License-Identifier: Apache-2.0
// Errors of system calls, and calls that a signal interrupts.
#pragma once

#include "support/status.h"

#include <cerrno>
#include <cstring>
#include <string>

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

} // namespace reshard
