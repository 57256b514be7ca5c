// SPDX-License-Identifier: Apache-2.0
// Spin-then-sleep backoff for polling.
#pragma once

#include <chrono>
#include <cstdint>
#include <sched.h>
#include <thread>

namespace reshard {

/// There may be more processes than cores: after some polls without success wait() sleeps, so that the awaited
/// processes get the core.
class Backoff {
public:
  void reset() { spins_ = 0; }
  void wait() {
    if (++spins_ < kSpins)
      sched_yield();
    else
      std::this_thread::sleep_for(kSleep);
  }

private:
  static constexpr uint64_t kSpins = 50;
  static constexpr std::chrono::microseconds kSleep{20};
  uint64_t spins_ = 0;
};

} // namespace reshard
