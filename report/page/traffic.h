// SPDX-License-Identifier: Apache-2.0
// The page's matrix of who sends to whom, and the bytes of each rank.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// {cells, ranks, patterns} of the steps of all ranks. `group`: neighboring ranks that share a row and a column.
///   cells     [from, to, bytes, messages, [[pattern, bytes]], parts] of each cell that moves something. Its patterns
///             and parts are those with most bytes. A part is a message [message, round, bytes]; if ranks share a
///             cell, it is a pair of ranks [from, to, bytes, messages].
///   ranks     by group, the rank of it with the most of each: [[bytes sent, rank], [received, rank], [copied, rank],
///             [arena, rank]]
///   patterns  the names of params, as their layouts declare them
/// Throws Failure.
nlohmann::ordered_json trafficOf(const Plan &plan, uint32_t group);

} // namespace reshard::report
