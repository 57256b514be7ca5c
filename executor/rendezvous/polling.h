// SPDX-License-Identifier: Apache-2.0
// Polls something that another process changes.
#pragma once

#include "base/deadline.h"

#include <algorithm>
#include <thread>

namespace reshard {

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
