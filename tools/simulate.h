// How long a plan would take: a flow-level simulation of its steps on a topology.
#pragma once

#include "executor/load.h"
#include "ir/ir.h"

#include <cstdint>
#include <string>
#include <vector>

namespace reshard::tools {

/// One activity of the simulation, for a trace.
struct Activity {
  enum class Kind : uint8_t { pack, transmit, unpack, copy } kind;
  int32_t rank = 0, peer = -1; // wire: from `rank` to `peer`
  uint32_t message = 0, round = 0;
  uint64_t bytes = 0;
  double begin = 0, end = 0; // seconds
};

/// A part of the floor: what it is, and seconds.
struct LowerBoundTerm {
  const char *name;
  double seconds;
};

struct Simulation {
  double seconds = 0;
  std::vector<LowerBoundTerm> lowerBound; // the largest counts; empty where the plan was compiled for other nodes
  double lowerBoundSeconds = 0;
  int64_t busiestRank = 0, busiestNic = 0; // by the time that they send or receive; NIC -1: nothing goes between nodes
  double rankBusy = 0, nicBusy = 0;        // seconds
  double secondsByKind[4] = {};            // by Activity::Kind, of the rank that spends most on it, in seconds
  std::vector<Activity> activities;        // where asked for
};

/// Plays all steps, messages chunk by chunk: packing and unpacking (of what is not in place) and local copies share a
/// rank's copying bandwidth; chunks inside a node share the links of their two ranks, others their two NICs, by max-min
/// fairness; what was sent arrives a latency later. A chunk starts when it is packed, when the receiver has room for
/// it, when what it passes on is there, and when its ranks are done with the chunk before it in the same tier and
/// direction, in which chunks are packed, and unpacked, one after the other as well. Rates are full from the start and
/// nothing is lost to protocols. `keep`: fill `activities`. An error text, empty on success.
std::string simulate(const Plan &plan, const ir::Topology &topology, bool keep, Simulation &result);

} // namespace reshard::tools
