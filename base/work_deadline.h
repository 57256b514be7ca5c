// SPDX-License-Identifier: Apache-2.0
// The deadline of a command's own work: synthesis, checks, proofs. The executor has the deadline of a run.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace reshard {

/// The deadline of a command's own work has passed.
struct DeadlinePassed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// While this object lives, work in any thread that exceeds the deadline throws a DeadlinePassed that names the
/// unfinished work. A process may have one such object at a time.
class WorkDeadline {
public:
  /// `what`: "the check"; 0 seconds: no deadline.
  WorkDeadline(const std::string &what, double seconds);
  ~WorkDeadline();
  WorkDeadline(const WorkDeadline &) = delete;
  WorkDeadline &operator=(const WorkDeadline &) = delete;

  /// Every loop whose length depends on a plan calls this with its approximate number of steps; the clock is read once
  /// in a while.
  static void spend(int64_t steps) {
    left_ -= steps;
    if (left_ < 0)
      look();
  }

private:
  static void look();
  static thread_local int64_t left_;
};

} // namespace reshard
