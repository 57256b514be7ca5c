// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect --format=html: one page without other files, made of page.html and data of the plan.
#pragma once

#include "base/status.h"
#include "base/topology.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// The most ranks that have a row and a column of their own in the page. Of more, neighbors share one.
constexpr uint32_t kPageRanks = 64;

/// The text of the page. topology: to simulate on; without it the page has no time line.
Result<std::string> pageOf(const Plan &plan, const std::optional<Topology> &topology);

/// {cells, ranks, patterns} of the steps of all ranks. `group`: neighboring ranks that share a row and a column.
///   cells     [from, to, bytes, messages, [[pattern, bytes]], parts] of each cell that moves something. Its patterns
///             and parts are those with most bytes. A part is a message [message, round, bytes]; if ranks share a
///             cell, it is a pair of ranks [from, to, bytes, messages].
///   ranks     by group, the rank of it with the most of each: [[bytes sent, rank], [received, rank], [copied, rank],
///             [arena, rank]]
///   patterns  the names of params, as their layouts declare them
Result<nlohmann::ordered_json> trafficOf(const Plan &plan, uint32_t group);

/// [{name, example, dtype, rows, columns, sides, pieces, left}] of each tensor pattern. `example`: its tensor with the
/// first index values, which is drawn. sides: by endpoint, {holders: [{param, ranks, more, boxes, cut}], left}:
///   ranks   the first ranks that hold the same elements, or files; more: the number of others
///   boxes   Boxes::json(); cut: whether boxes are left out
///   left    the number of groups of ranks that are not drawn
/// pieces: [from, to, sender, receiver, message, round, relay, bytes, boxes, cut]: elements that go from a rank to
/// another. from, to: [endpoint, rank or file]; sender and receiver: the ranks that do it; message -1: a copy; relay:
/// null, or [rank, message, round] of a rank that forwards them through its arena, where `message` brings them from
/// there. left: whether pieces of ranks in `sides` are left out.
Result<nlohmann::ordered_json> tensorsOf(const Plan &plan);

/// {seconds, bound, terms, lanes} of a simulation on a topology. `bound`: null if it is unknown; `group`: neighboring
/// ranks of which one is drawn, that which is busy longest.
/// lanes: [{rank, spans, limit, most, arena}]: times are in nanoseconds, sizes in bytes
///   spans  [kind, begin, length, peer, bytes]; kind as Activity::Kind, or 4 of a transmission to the rank; peer -1:
///          several ranks, or none
///   limit  the size of its arena; most: the most bytes of it that are in use at one time
///   arena  [time, bytes]: bytes in use from that time on. Of many changes, the most of equal intervals
Result<nlohmann::ordered_json> timesOf(const Plan &plan, const Topology &topology, uint32_t group);

} // namespace reshard::report
