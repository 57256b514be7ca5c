// SPDX-License-Identifier: Apache-2.0
#include "base/work_deadline.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <limits>
#include <mutex>

namespace reshard {

namespace {

constexpr int64_t kSteps = 1 << 16; // between two readings of the clock: a few hundred microseconds
constexpr double kNever = std::numeric_limits<double>::infinity();
std::atomic<double> end = kNever;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::mutex messageMutex; // protects `message`
std::string message;

} // namespace

thread_local int64_t WorkDeadline::left_ = kSteps;

WorkDeadline::WorkDeadline(const std::string &what, double seconds) {
  if (seconds <= 0)
    return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  const std::lock_guard lock(messageMutex);
  message = what + " did not finish within the deadline of " + text + " s (--timeout)";
  end = now() + seconds;
}

WorkDeadline::~WorkDeadline() { end = kNever; }

void WorkDeadline::look() {
  left_ = kSteps;
  if (now() < end)
    return;
  const std::lock_guard lock(messageMutex);
  throw DeadlinePassed(message);
}

} // namespace reshard
