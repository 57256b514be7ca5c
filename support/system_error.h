// SPDX-License-Identifier: Apache-2.0
// Errors of system calls.
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

} // namespace reshard
