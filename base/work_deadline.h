// SPDX-License-Identifier: Apache-2.0
// The deadline of a command's own work: synthesis, checks, proofs. The executor passes a Deadline.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <functional>
#include <string>

namespace reshard {

class WorkDeadline {
public:
  /// The status of work(), or a timedOut error that names it (`what`: "the check") if it takes longer than `seconds`;
  /// 0: no deadline. Ends the work on all threads of parallelFor(). A process does one such work at a time.
  static Status run(const std::string &what, double seconds, const std::function<Status()> &work);

  /// Every loop whose length depends on a plan calls this with its approximate number of steps; the clock is read once
  /// in a while. The work ends with an exception that run() alone catches: visitors of layouts return nothing.
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
