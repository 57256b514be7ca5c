// SPDX-License-Identifier: Apache-2.0
#include "executor/api/callback_store.h"

namespace reshard {

namespace {

/// After the deadline, for the look that explains what is missing.
constexpr std::chrono::milliseconds kGrace{200};

/// Asked before each call: the calls of a slow store must not outlast the deadline together.
Status inTime(const char *what, const std::string &key, const Deadline &deadline) {
  const bool late = deadline && std::chrono::steady_clock::now() >= *deadline + kGrace;
  return late || (deadline.interrupt && deadline.interrupt->ask())
             ? timedOut("timed out " + std::string(what) + " '" + key + "' of the caller's store")
             : Status();
}

} // namespace

Status CallbackStore::set(const std::string &key, std::string_view value, const Deadline &deadline) {
  if (Status status = inTime("setting", key, deadline); !status.ok())
    return status;
  const reshard_status status = store_.set(store_.user, key.c_str(), value.data(), value.size());
  if (status == RESHARD_TIMEOUT)
    return timedOut("timed out setting '" + key + "' of the caller's store");
  return status == RESHARD_OK ? Status()
                              : failed("the caller's store could not set '" + key + "': its function returned " +
                                       std::to_string(status));
}

Result<std::optional<std::string>> CallbackStore::find(const std::string &key, const Deadline &deadline) {
  std::string value(4096, '\0');
  while (true) { // until a value that grows with every call fits
    if (Status status = inTime("getting", key, deadline); !status.ok())
      return status;
    size_t bytes = 0;
    const reshard_status status = store_.get(store_.user, key.c_str(), value.data(), value.size(), &bytes);
    if (status == RESHARD_TIMEOUT)
      return std::optional<std::string>();
    if (status != RESHARD_OK)
      return failed("the caller's store could not get '" + key + "': its function returned " + std::to_string(status));
    if (bytes > kMaxValueBytes)
      return failed("the caller's store has " + std::to_string(bytes) + " bytes at '" + key + "', expected at most " +
                    std::to_string(kMaxValueBytes));
    const bool fits = bytes <= value.size();
    value.resize(bytes);
    if (fits)
      return std::optional<std::string>(std::move(value));
  }
}

} // namespace reshard
