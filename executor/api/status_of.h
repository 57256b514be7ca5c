// SPDX-License-Identifier: Apache-2.0
// The C API's status of a Status.
#pragma once

#include "base/status.h"
#include "reshard/reshard.h"

namespace reshard {

inline reshard_status statusOf(const Status &status) {
  if (status.ok())
    return RESHARD_OK;
  switch (status.kind()) {
  case ErrorKind::invalid:
    return RESHARD_INVALID;
  case ErrorKind::badPlan:
    return RESHARD_BAD_PLAN;
  case ErrorKind::badBinding:
    return RESHARD_BAD_BINDING;
  case ErrorKind::timedOut:
    return RESHARD_TIMEOUT;
  case ErrorKind::failed:
  case ErrorKind::negative:
    break;
  }
  return RESHARD_FAILED;
}

} // namespace reshard
