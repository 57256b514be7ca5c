// SPDX-License-Identifier: Apache-2.0
// A store that a caller of reshard_open has, in this process.
#pragma once

#include "reshard/reshard.h"

#include <map>
#include <mutex>
#include <string>

namespace reshard::tests {

struct CallersStore {
  std::map<std::string, std::string> values;
  std::mutex mutex; // calls come from several threads
  bool fails = false;
  int calls = 0;

  reshard_store store() {
    reshard_store store = RESHARD_STORE_INITIALIZER;
    store.user = this;
    store.set = set;
    store.get = get;
    return store;
  }
  static reshard_status set(void *user, const char *key, const void *value, size_t bytes) {
    auto &self = *static_cast<CallersStore *>(user);
    const std::lock_guard lock(self.mutex);
    ++self.calls;
    self.values[key].assign(static_cast<const char *>(value), bytes);
    return self.fails ? RESHARD_FAILED : RESHARD_OK;
  }
  static reshard_status get(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes) {
    auto &self = *static_cast<CallersStore *>(user);
    const std::lock_guard lock(self.mutex);
    ++self.calls;
    const auto found = self.values.find(key);
    if (found == self.values.end())
      return RESHARD_TIMEOUT;
    *bytes = found->second.size();
    if (*bytes <= capacity)
      found->second.copy(static_cast<char *>(buffer), *bytes);
    return RESHARD_OK;
  }
};

} // namespace reshard::tests
