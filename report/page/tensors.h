// SPDX-License-Identifier: Apache-2.0
// The page's pictures of tensors: which rows and columns each rank holds on both sides, and the pieces that move.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace reshard {
class Plan;
}

namespace reshard::report {

/// [{name, example, dtype, rows, columns, sides, pieces, left}] of each tensor pattern. `example`: its tensor with the
/// first index values, which is drawn. sides: by endpoint, {holders: [{param, ranks, more, boxes, cut}], left}:
///   ranks   the first ranks that hold the same elements, or files; more: the number of others
///   boxes   Boxes::json(); cut: whether boxes are left out
///   left    the number of groups of ranks that are not drawn
/// pieces: [from, to, sender, receiver, message, round, relay, bytes, boxes, cut]: elements that go from a rank to
/// another. from, to: [endpoint, rank or file]; sender and receiver: the ranks that do it; message -1: a copy; relay:
/// null, or [rank, message, round] of a rank that forwards them through its arena, where `message` brings them from
/// there. left: whether pieces of ranks in `sides` are left out. Throws Failure.
nlohmann::ordered_json tensorsOf(const Plan &plan);

} // namespace reshard::report
