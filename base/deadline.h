// SPDX-License-Identifier: Apache-2.0
// The time at which a wait ends with an error.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

namespace reshard {

/// The caller's answer to whether a call shall end now, for example because the user has pressed Ctrl-C. Waits ask on
/// the thread of the call, and seldom, since the answer may take a lock of the caller's language.
class Interrupt {
public:
  using Clock = std::chrono::steady_clock;
  using Asked = int (*)(void *user); // not 0: the call ends

  Interrupt() = default;
  Interrupt(Asked asked, void *user) : asked_(asked), user_(user) {}
  Interrupt(const Interrupt &) = delete;
  Interrupt &operator=(const Interrupt &) = delete;

  void set(Asked asked, void *user) {
    asked_ = asked;
    user_ = user;
  }
  /// A call of this thread begins.
  void begin() {
    thread_ = std::this_thread::get_id();
    next_ = Clock::now() + kPause;
    raised_ = false;
  }
  /// Whether the call in progress has been told to end.
  bool raised() const { return raised_; }
  /// The same, after asking again if it is time.
  bool ask() {
    if (!asked_ || raised_ || std::this_thread::get_id() != thread_)
      return raised_;
    if (const Clock::time_point now = Clock::now(); now >= next_) {
      raised_ = asked_(user_) != 0;
      next_ = Clock::now() + kPause;
    }
    return raised_;
  }

  static constexpr std::chrono::milliseconds kPause{50};

private:
  Asked asked_ = nullptr;
  void *user_ = nullptr;
  std::thread::id thread_;
  Clock::time_point next_;
  std::atomic<bool> raised_ = false; // other threads of the call read it
};

/// No value: wait without limit. An interrupt ends the wait as its time does.
struct Deadline : std::optional<std::chrono::steady_clock::time_point> {
  using optional::optional;
  Interrupt *interrupt = nullptr;
};

/// The time `seconds` from now; no deadline if that is not positive.
inline Deadline deadlineIn(double seconds, Interrupt *interrupt = nullptr) {
  using Clock = std::chrono::steady_clock;
  Deadline deadline;
  if (seconds > 0)
    deadline = Clock::now() +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
  deadline.interrupt = interrupt;
  return deadline;
}

inline bool passed(const Deadline &deadline) {
  return (deadline.interrupt && deadline.interrupt->ask()) ||
         (deadline && std::chrono::steady_clock::now() >= *deadline);
}

} // namespace reshard
