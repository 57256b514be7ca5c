// SPDX-License-Identifier: Apache-2.0
// Estimates the time of a plan: a flow-level simulation of its steps on a topology.
#pragma once

#include "base/topology.h"
#include "executor/load/load.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::report {

/// One activity of the simulation, for a trace.
struct Activity {
  enum class Kind : uint8_t { pack, transmit, unpack, copy } kind;
  int32_t rank = 0, peer = -1; // transmit: from `rank` to `peer`
  uint32_t message = 0, round = 0;
  uint64_t bytes = 0;
  double begin = 0, end = 0; // seconds
};

/// One term of the lower bound: its name and its value in seconds.
struct LowerBoundTerm {
  const char *name;
  double seconds;
};

struct Simulation {
  double seconds = 0;
  std::vector<LowerBoundTerm>
      lowerBound; // the largest term is the bound; empty if the plan was compiled for another topology
  double lowerBoundSeconds = 0;
  int64_t busiestRank = 0, busiestNic = 0; // longest in use; NIC -1: no traffic between nodes
  double rankBusy = 0, nicBusy = 0;        // seconds
  double secondsByKind[4] = {};            // by Activity::Kind: the seconds of the rank with the largest sum
  /// Visits all activities: those of one message and kind in the order of its chunks, copies of a rank in the order of
  /// its steps. There are millions, so no list of them is kept.
  std::function<void(const std::function<void(const Activity &)> &visit)> forEachActivity;
};

/// Simulates all steps, messages chunk by chunk. Packing and unpacking (of staged operands) and local copies share a
/// rank's copy bandwidth. Chunks inside a node share the links of their two ranks, other chunks the NICs, by max-min
/// fairness; bytes arrive one latency after they were sent. A chunk starts when it is packed, the receiver has a free
/// slot, the bytes that it relays have arrived, and its ranks have finished the previous chunk of the same link tier
/// and direction. In each tier and direction, chunks are packed and unpacked one after the other. A local copy starts
/// when the steps that it waits for are done, and so does a message that replaces elements that a copy reads from the
/// arena. There is no ramp-up and no protocol overhead. `progress` is called with the done
/// part, 0 to 1.
Result<Simulation> simulate(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress);

} // namespace reshard::report
