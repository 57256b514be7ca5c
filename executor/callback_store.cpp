// SPDX-License-Identifier: Apache-2.0
#include "executor/callback_store.h"

namespace reshard {

Status CallbackStore::set(const std::string &key, std::string_view value, const Deadline &) {
  const reshard_status status = store_.set(store_.user, key.c_str(), value.data(), value.size());
  return status == RESHARD_OK ? Status()
                              : failed("the caller's store could not set '" + key + "': its function returned " +
                                       std::to_string(status));
}

Result<std::optional<std::string>> CallbackStore::find(const std::string &key, const Deadline &deadline) {
  std::string value(4096, '\0');
  while (true) {
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
    if (passed(deadline)) // a value that grows with every call
      return timedOut("timed out getting '" + key + "' of the caller's store");
  }
}

} // namespace reshard
