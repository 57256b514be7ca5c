// Ways along which ranks pass on what one of them has: chains of nodes, and the classical exchanges among equals.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace reshard {

/// The place that gets a transfer first, and the hops on from there.
struct BroadcastTree {
  int32_t root = -1;
  ir::Route route;
};

/// Along a chain of `count` of the nodes, from node `first` on, round the end. `nodes`: the places on each node, in
/// order. In each node place number `stripe`, modulo their number, takes it in and gives it to the others.
BroadcastTree chain(const std::vector<std::vector<int32_t>> &nodes, size_t first, size_t count, size_t stripe);

/// From place number `rank` of node `node`, which has it, to all others of `nodes`. `exchange` is not `automatic`.
BroadcastTree broadcastTree(ir::Exchange exchange, const std::vector<std::vector<int32_t>> &nodes, size_t node,
                            size_t rank);

/// How long exchanges take that run together: the bytes of the busiest port, one after the other, and the delay of the
/// longest way, a latency and a message of bestMessage's size for each hop.
class ExchangeCost {
public:
  explicit ExchangeCost(const ir::Layout &layout) : layout_(layout) {}

  /// `bytes` go along `way`, between places of `endpoint`.
  void add(const ir::Endpoint &endpoint, const BroadcastTree &tree, int64_t bytes);

  /// In nanoseconds.
  int64_t time() const;

private:
  const ir::Layout &layout_;
  std::map<std::pair<int32_t, int32_t>, int64_t> pairs_; // bytes by sender and receiver, world ranks
  int64_t hops_ = 0;                                     // of the longest way
};

} // namespace reshard
