// SPDX-License-Identifier: Apache-2.0
// Spin-then-sleep backoff for polling.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <sched.h>
#include <thread>

namespace reshard {

/// There may be more processes than cores: after some polls without success wait() sleeps, so that the awaited
/// processes get the core. A sleep lasts 1/64 of the time waited so far, within limits: a long wait uses little of a
/// core, and ends soon after the awaited event.
class Backoff {
public:
  /// `spins`: number of polls before the first sleep.
  explicit Backoff(uint64_t spins = 50) : spins_(spins) {}

  void reset() { polls_ = 0; }

  void wait() {
    if (++polls_ < spins_) {
      sched_yield();
      return;
    }
    const Clock::time_point now = Clock::now();
    if (polls_ == spins_)
      begin_ = now;
    std::this_thread::sleep_for(std::clamp<Clock::duration>((now - begin_) / 64, kShortest, kLongest));
  }

private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
  const uint64_t spins_;
  uint64_t polls_ = 0;
  Clock::time_point begin_;
};

} // namespace reshard
