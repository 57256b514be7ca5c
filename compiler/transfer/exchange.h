// SPDX-License-Identifier: Apache-2.0
// Broadcast trees: the routes by which bytes that one target has reach the other targets. Chains of nodes, and the
// exchanges of `options.exchange`.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace reshard {

/// The mesh rank that receives a transfer first, and the hops from it to the others.
struct BroadcastTree {
  int32_t root = -1;
  ir::Route route;
};

/// A chain of `count` nodes that starts at node `first` and wraps around at the end of `nodes`, which lists the mesh
/// ranks on each node, ascending. In each node the mesh rank with index `stripe` modulo their number receives from the
/// node before and sends to the others.
BroadcastTree chain(const std::vector<std::vector<int32_t>> &nodes, size_t first, size_t count, size_t stripe);

/// From mesh rank nodes[node][rank], which has the bytes, to all others of `nodes`. `exchange` is not `automatic`.
BroadcastTree broadcastTree(ir::Exchange exchange, const std::vector<std::vector<int32_t>> &nodes, size_t node,
                            size_t rank);

/// Estimates the time of several exchanges that run at the same time: the bytes of the busiest port at its rate, plus
/// the delay of the longest route: a latency for each hop, and the time of a chunk (bestChunkBytes) for each hop after
/// the first.
class ExchangeCost {
public:
  explicit ExchangeCost(const ir::Layout &layout) : layout_(layout) {}

  /// Adds `bytes` bytes that pass every hop of `tree`, which names mesh ranks of `endpoint`.
  void add(const ir::Endpoint &endpoint, const BroadcastTree &tree, int64_t bytes);

  /// The estimate in nanoseconds.
  int64_t time() const;

private:
  const ir::Layout &layout_;
  std::map<std::pair<int32_t, int32_t>, int64_t> pairs_; // bytes by sender and receiver (world ranks)
  int64_t hops_ = 0;                                     // how many hops the longest route has
};

} // namespace reshard
