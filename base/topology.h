// SPDX-License-Identifier: Apache-2.0
// The network between the ranks.
#pragma once

#include <cstdint>

namespace reshard {

constexpr int64_t kMaxWorld = 1 << 20; // ranks

/// Rates are bytes per second and direction; latencies are nanoseconds. The defaults
/// describe nodes of eight H100 with a 400 Gb/s NIC each (sources: examples/topologies/h100x8.yaml).
struct Topology {
  int64_t ranksPerNode = 0;                                // 0: all ranks on one node
  int64_t linkRate = 450'000'000'000, linkLatency = 3'000; // a rank's links inside its node
  int64_t nicsPerNode = 0;                                 // divided among the node's ranks in order; 0: one per rank
  int64_t nicRate = 50'000'000'000, nicLatency = 8'000;    // a NIC, between nodes
  int64_t copyRate = 1'300'000'000'000;                    // bytes that a rank copies, each read once and written once
  /// The node of a world rank.
  int64_t node(int64_t rank) const { return ranksPerNode > 0 ? rank / ranksPerNode : 0; }
  /// The NIC of a world rank, numbered over all nodes.
  int64_t nic(int64_t rank) const {
    return nicsPerNode == 0 || ranksPerNode == 0
               ? rank
               : node(rank) * nicsPerNode + rank % ranksPerNode * nicsPerNode / ranksPerNode;
  }
  /// The most ranks that share a NIC.
  int64_t ranksOfNic() const {
    return nicsPerNode == 0 || ranksPerNode == 0 ? 1 : (ranksPerNode + nicsPerNode - 1) / nicsPerNode;
  }
  bool operator==(const Topology &) const = default;
};

} // namespace reshard
