// SPDX-License-Identifier: Apache-2.0
// A key-value store that all processes of a job can reach: the only means by which processes with different parents
// find each other. Also the pauses between polls of something that another process changes.
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

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

/// Waits 1 ms between the first two polls, then twice as long each time, up to a limit.
class Polling {
public:
  explicit Polling(std::chrono::milliseconds limit) : limit_(limit) {}

  /// Waits until the next poll. Returns false if the deadline has passed instead.
  bool wait(const Deadline &deadline) {
    if (passed(deadline))
      return false;
    auto until = std::chrono::steady_clock::now() + pause_;
    if (deadline)
      until = std::min(until, *deadline);
    while (deadline.interrupt && until - std::chrono::steady_clock::now() > Interrupt::kPause) {
      std::this_thread::sleep_for(Interrupt::kPause);
      if (passed(deadline))
        return false;
    }
    std::this_thread::sleep_until(until);
    pause_ = std::min(pause_ * 2, limit_);
    return true;
  }
  void reset() { pause_ = std::chrono::milliseconds(1); }

private:
  std::chrono::milliseconds pause_{1};
  const std::chrono::milliseconds limit_;
};

} // namespace reshard
