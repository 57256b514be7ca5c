// SPDX-License-Identifier: Apache-2.0
// The time at which a wait ends with an error.
#pragma once

#include <chrono>
#include <optional>

namespace reshard {

/// No value: wait without limit.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

inline bool passed(const Deadline &deadline) { return deadline && std::chrono::steady_clock::now() >= *deadline; }

} // namespace reshard
