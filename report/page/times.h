// SPDX-License-Identifier: Apache-2.0
// The page's time line and the use of arenas, from the simulator.
#pragma once

#include "base/topology.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// {seconds, bound, terms, lanes} of a simulation on a topology. `bound`: null if it is unknown; `group`: neighboring
/// ranks of which one is drawn, that which is busy longest.
/// lanes: [{rank, spans, limit, most, arena}]: times are in nanoseconds, sizes in bytes
///   spans  [kind, begin, length, peer, bytes]; kind as Activity::Kind, or 4 of a transmission to the rank; peer -1:
///          several ranks, or none
///   limit  the size of its arena; most: the most bytes of it that are in use at one time
///   arena  [time, bytes]: bytes in use from that time on. Of many changes, the most of equal intervals
/// Throws Failure.
nlohmann::ordered_json timesOf(const Plan &plan, const Topology &topology, uint32_t group);

} // namespace reshard::report
