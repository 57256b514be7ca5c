// When waiting ends.
#pragma once

#include <chrono>
#include <optional>

namespace reshard {

/// None: never.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

inline bool passed(const Deadline &deadline) { return deadline && std::chrono::steady_clock::now() >= *deadline; }

} // namespace reshard
