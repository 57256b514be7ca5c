// SPDX-License-Identifier: Apache-2.0
// The time at which a wait ends with an error.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace reshard {

/// No value: wait without limit.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

/// The time `seconds` from now; no deadline if that is not positive.
inline Deadline deadlineIn(double seconds) {
  using Clock = std::chrono::steady_clock;
  if (!(seconds > 0))
    return {};
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
}

inline bool passed(const Deadline &deadline) { return deadline && std::chrono::steady_clock::now() >= *deadline; }

} // namespace reshard
