#include "compiler/schedule/round_limits.h"

#include "compiler/transfer/message_size.h"
#include "compiler/transfer/staging.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace reshard {

namespace {

constexpr int64_t kMostRounds = 8;
constexpr int64_t kMostChunks = 1 << 24; // of a plan: a small staging limit makes many

/// The load of a port or, as maxima over ports, of a link tier; `total` is the sum of a tier.
struct Load {
  int64_t total = 0, bytes = 0, partners = 0;
};

int64_t aligned(int64_t bytes) { return bytes / kStagingAlignment * kStagingAlignment; }

} // namespace

llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged) {
  const ir::Topology &topology = layout.topology;
  Load loads[2]; // between nodes, inside nodes
  std::map<std::pair<int64_t, bool>, Load> ports[2];
  int64_t depth = 0;
  for (const Flow &flow : flows) {
    std::vector<int64_t> depths(flow.hops.size());
    for (size_t h = 0; h < flow.hops.size(); ++h) {
      const Flow::Hop &hop = flow.hops[h];
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      if (hop.after >= 0)
        depths[h] = depths[hop.after] + 1;
      depth = std::max(depth, depths[h]);
      loads[local].total += flow.bytes;
      for (const bool sends : {true, false}) {
        const int64_t rank = sends ? hop.from : hop.to;
        Load &port = ports[local][{rank, sends}];
        port.bytes += flow.bytes;
        ++port.partners;
        loads[local].bytes = std::max(loads[local].bytes, port.bytes);
        loads[local].partners = std::max(loads[local].partners, port.partners);
      }
    }
  }
  const bool internode = loads[0].total > 0, intranode = loads[1].total > 0;
  RoundLimits limits;
  limits.internodeRounds = internode && intranode
                               ? static_cast<uint32_t>(std::clamp<int64_t>(
                                     (loads[1].bytes + loads[0].bytes - 1) / loads[0].bytes, 1, kMostRounds))
                               : 1;
  const int64_t ofRank = topology.nicRate / topology.ranksOfNic(); // several ranks share a NIC
  limits.internodeBytes = bestChunkBytes(loads[0].bytes, loads[0].partners, depth, ofRank, topology.nicLatency);
  limits.intranodeBytes =
      bestChunkBytes(loads[1].bytes, loads[1].partners, depth, topology.linkRate, topology.linkLatency);
  if (internode && intranode) // no tier then waits for the end of the other's round
    limits.intranodeBytes = std::min(limits.intranodeBytes, limits.internodeBytes);
  const int64_t busiest = std::max(loads[0].bytes / limits.internodeBytes, loads[1].bytes / limits.intranodeBytes);
  if (layout.stagingLimit == 0) {
    if (busiest > kMostChunks)
      return llvm::createStringError("a rank sends or receives " +
                                     std::to_string(std::max(loads[0].bytes, loads[1].bytes)) +
                                     " bytes, which is more than 2^24 chunks of at most 64 MiB; use more ranks");
    return limits;
  }
  const int64_t limit = std::max<int64_t>(0, layout.stagingLimit - staged);

  const int64_t slot = limit / 4, room = internode && intranode ? slot / 2 : slot;
  limits.internodeBytes = aligned(std::min(limits.internodeBytes, room));
  limits.intranodeBytes = aligned(std::min(limits.intranodeBytes, room));
  const int64_t total = loads[0].total + loads[1].total;
  const int64_t least =
      std::min(internode ? limits.internodeBytes : INT64_MAX, intranode ? limits.intranodeBytes : INT64_MAX);
  if (least > 0 && total / least <= kMostChunks)
    return limits;
  const int64_t parts = internode && intranode ? 8 : 4;
  std::string use = std::to_string(total) + " bytes of messages";
  if (staged > 0)
    use += " beside " + std::to_string(staged) + " bytes that are staged to be quantized, transformed or relayed";
  return llvm::make_error<StagingLimitError>(
      layout.stagingLimit, (total / kMostChunks + kStagingAlignment) * parts + staged, std::move(use));
}

} // namespace reshard
