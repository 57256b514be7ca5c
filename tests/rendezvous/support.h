// SPDX-License-Identifier: Apache-2.0
// For the tests of the rendezvous: deadlines, secrets, folders, a store in memory that can lose keys.
#pragma once

#include "base/status.h"
#include "executor/rendezvous/records.h"
#include "executor/rendezvous/store.h"
#include "tests/lib/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace reshard::tests {

inline Deadline in(int milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

inline Authenticator secret(const std::string &text) {
  Result<Authenticator> made = Authenticator::create(text);
  EXPECT_EQ(made.status().message(), "");
  return made.ok() ? *made : Authenticator();
}

/// The value of a key; empty if it is not set.
inline std::string valueOf(Store &store, const std::string &key) {
  const Result<std::optional<std::string>> found = store.find(key, in(10'000));
  EXPECT_EQ(found.status().message(), "");
  return found.ok() && *found ? **found : "";
}

class Memory {
public:
  std::map<std::string, std::string> values;
  std::mutex mutex;
  /// Called before a key is set; false: the store loses it.
  std::function<bool(const std::string &key)> keeps = [](const std::string &) { return true; };
};

class MemoryStore : public Store {
public:
  explicit MemoryStore(Memory &memory) : memory_(memory) {}
  Status set(const std::string &key, std::string_view value, const Deadline &) override {
    const std::lock_guard<std::mutex> lock(memory_.mutex);
    if (memory_.keeps(key))
      memory_.values[key] = value;
    return {};
  }
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &) override {
    const std::lock_guard<std::mutex> lock(memory_.mutex);
    const auto at = memory_.values.find(key);
    return at == memory_.values.end() ? std::nullopt : std::optional(at->second);
  }

private:
  Memory &memory_;
};

} // namespace reshard::tests
