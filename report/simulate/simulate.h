// SPDX-License-Identifier: Apache-2.0
// Estimates the time of a plan: a flow-level simulation of its steps on a topology, and of the reads by which the
// engine replicas of a pool pull a version.
#pragma once

#include "base/topology.h"
#include "executor/load/load.h"
#include "report/simulate/lower_bound.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace reshard::report {

/// One activity of the simulation: of one chunk of a message, or of a whole copy.
struct Activity {
  enum class Kind : uint8_t { pack, transmit, unpack, copy } kind;
  int32_t rank = 0, peer = -1;               // transmit: from `rank` to `peer`
  uint32_t step = 0, message = 0, round = 0; // step: its number on `rank`
  uint64_t bytes = 0;
  double begin = 0, end = 0; // seconds
};

struct Simulation {
  double seconds = 0;
  std::optional<LowerBound> lowerBound;    // nullopt if the plan was compiled for a topology with other nodes
  int64_t busiestRank = 0, busiestNic = 0; // longest in use; NIC -1: no traffic between nodes
  double rankBusy = 0, nicBusy = 0;        // seconds
  double secondsByKind[4] = {};            // by Activity::Kind: the seconds of the rank with the largest sum
};

/// Simulates all steps, messages chunk by chunk. Packing and unpacking (of staged operands) and local copies share a
/// rank's copy bandwidth. Chunks inside a node share the links of their two ranks, other chunks the NICs, by max-min
/// fairness; bytes arrive one latency after they were sent. A chunk starts when it is packed, its slot at the receiver
/// is free (compared by address: schema/README.md, Chunks), the bytes that it relays have arrived, and its ranks have
/// finished the previous chunk of the same link tier and direction. In each tier and direction, chunks are packed and
/// unpacked one after the other. A local copy starts when the steps that it waits for are done, and so does a message
/// that replaces elements that a copy reads from the arena. There is no ramp-up and no protocol overhead. `progress` is
/// called with the done part, 0 to 1; `visit` with each activity when it ends. There are millions, so no list of them
/// is kept.
Result<Simulation> simulate(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress,
                            const std::function<void(const Activity &)> &visit = {});

struct PoolSimulation {
  uint32_t replicas = 0;
  double seconds = 0;                                   // until all have the version, if all begin at once
  double lateSeconds = 0;                               // for one more, if all others have the version and are idle
  std::optional<LowerBound> lowerBound, lateLowerBound; // nullopt as in Simulation
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
