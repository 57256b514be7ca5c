// The deadline of what a command does itself: synthesis, checks, proofs. That of a run is the executor's.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::tools {

/// While it lives, work in any thread that goes on for longer ends with a Failure that says what was not done. One at a
/// time in a process.
class WorkDeadline {
public:
  /// `what`: "the check"; 0 seconds: no deadline.
  WorkDeadline(std::string what, double seconds);
  ~WorkDeadline();
  WorkDeadline(const WorkDeadline &) = delete;
  WorkDeadline &operator=(const WorkDeadline &) = delete;

  /// Called by every loop whose length a plan's numbers decide, with about as many steps as it does: now and then it
  /// looks at the clock.
  static void spend(int64_t steps) {
    if ((left_ -= steps) < 0)
      look();
  }

private:
  static void look();
  static thread_local int64_t left_;
};

} // namespace reshard::tools
