// SPDX-License-Identifier: Apache-2.0
#include "base/work_deadline.h"

#include "base/deadline.h"

#include <cstdio>

namespace reshard {

namespace {

constexpr int64_t kSteps = 1 << 16; // between two readings of the clock: a few hundred microseconds
std::atomic<const Deadline *> current = nullptr;
struct WorkTimedOut {};

} // namespace

thread_local int64_t WorkDeadline::left_ = kSteps;

Status WorkDeadline::run(const std::string &what, double seconds, const std::function<Status()> &work) {
  const Deadline deadline = deadlineIn(seconds);
  struct Current {
    explicit Current(const Deadline *value) { current = value; }
    ~Current() { current = nullptr; }
  } const whileWorking(&deadline);
  try {
    return work();
  } catch (const WorkTimedOut &) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", seconds);
    return timedOut(what + " did not finish within the deadline of " + text + " s (--timeout)");
  }
}

void WorkDeadline::look() {
  left_ = kSteps;
  if (const Deadline *deadline = current; deadline && passed(*deadline))
    throw WorkTimedOut();
}

} // namespace reshard
