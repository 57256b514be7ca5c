// SPDX-License-Identifier: Apache-2.0
// Estimates how long the engine replicas of a pool need to pull a version: a simulation of their reads on a topology.
#pragma once

#include "report/simulate/simulate.h"

#include <cstdint>
#include <vector>

namespace reshard::report {

struct PoolSimulation {
  uint32_t replicas = 0;
  double seconds = 0;                     // until all have the version, if all begin at once
  double lateSeconds = 0;                 // for one more, if all others have the version and are idle
  std::vector<LowerBoundTerm> lowerBound; // empty if the plan was compiled for another topology
  double lowerBoundSeconds = 0, lateLowerBoundSeconds = 0;
};

/// Simulates a plan whose target is a pool of `replicas` engine replicas (1 or more).
///
/// Replica 0 reads from the sources. The others form a chain: mesh rank i of replica k reads from mesh rank i of
/// replica k - 1, range by range, as soon as a range has arrived there. (More chains are slower: their first replicas
/// read from the same source rank at the same time, while other source ranks wait.) Ranks of a replica forward to each
/// other as the plan says, when all that they read before has arrived. A message is read in ranges of 4 MiB. A rank has
/// at most 4 reads in flight from its parent and 4 from ranks of its own replica, both in the order of its steps. A
/// read takes one latency to the rank that serves it; there it waits until the range has arrived, is packed if the plan
/// stages it, and is sent. Packing, unpacking and copies share a rank's copy bandwidth. Each link, each NIC (in each
/// direction) and each rank's copy bandwidth is used by one read at a time, in the order of arrival. Three round trips
/// are added for the messages of the protocol. There is no ramp-up, and processors take no time.
///
/// Each replica is on nodes of its own, at the same positions in them as replica 0: where R ranks do not fill whole
/// nodes, the rest of the last node is idle. Without nodes in the topology, all ranks are on one node.
Result<PoolSimulation> simulatePool(const Plan &plan, const Topology &topology, uint32_t replicas);

} // namespace reshard::report
