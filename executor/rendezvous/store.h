// SPDX-License-Identifier: Apache-2.0
// A key-value store that all processes of a job can reach: the only means by which processes with different parents
// find each other.
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace reshard {

/// One thread of a process uses it.
class Store {
public:
  virtual ~Store() = default;

  /// Sets a key, or replaces its value. Other processes see the old value or the new one, never a part.
  virtual Status set(const std::string &key, std::string_view value, const Deadline &deadline) = 0;
  /// The value of a key, or no value if the key is not set. The deadline is that of the store's answer: it does not
  /// wait for the key, since the key of an earlier attempt may be set already, and a caller looks until it finds its
  /// own.
  virtual Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) = 0;
};

/// The sizes in bytes that every store accepts.
constexpr size_t kMaxKeyBytes = 4096, kMaxValueBytes = size_t{16} << 20;

} // namespace reshard
