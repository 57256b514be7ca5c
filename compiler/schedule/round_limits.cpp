// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/round_limits.h"

#include "compiler/transfer/message_size.h"
#include "compiler/transfer/staging.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace reshard {

namespace {

constexpr int64_t kMaxRounds = 8;

/// The load of a port or, as maxima over ports, of a link tier; `total` is the sum of a tier.
struct Load {
  int64_t total = 0, bytes = 0, partners = 0;
};

/// The loads of all flows.
struct Loads {
  Load internode, intranode;
  int64_t depth = 0; // hops after the first on the longest route
};

Loads loadsOf(const std::vector<Flow> &flows, const ir::Topology &topology) {
  Loads result;
  std::map<std::pair<int64_t, bool>, Load> ports[2];
  for (const Flow &flow : flows) {
    std::vector<int64_t> depths(flow.hops.size());
    for (size_t h = 0; h < flow.hops.size(); ++h) {
      const Flow::Hop &hop = flow.hops[h];
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      if (hop.after >= 0)
        depths[h] = depths[hop.after] + 1;
      result.depth = std::max(result.depth, depths[h]);
      Load &tier = local ? result.intranode : result.internode;
      tier.total += flow.bytes;
      for (const bool sends : {true, false}) {
        const int64_t rank = sends ? hop.from : hop.to;
        Load &port = ports[local][{rank, sends}];
        port.bytes += flow.bytes;
        ++port.partners;
        tier.bytes = std::max(tier.bytes, port.bytes);
        tier.partners = std::max(tier.partners, port.partners);
      }
    }
  }
  return result;
}

int64_t aligned(int64_t bytes) { return bytes / kStagingAlignment * kStagingAlignment; }

} // namespace

llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged) {
  const ir::Topology &topology = layout.topology;
  const auto [between, inside, depth] = loadsOf(flows, topology);
  const bool internode = between.total > 0, intranode = inside.total > 0;
  RoundLimits limits;
  limits.internodeRounds = internode && intranode
                               ? static_cast<uint32_t>(std::clamp<int64_t>(
                                     (inside.bytes + between.bytes - 1) / between.bytes, 1, kMaxRounds))
                               : 1;
  const int64_t ofRank = topology.nicRate / topology.ranksOfNic(); // several ranks share a NIC
  limits.internodeBytes = bestChunkBytes(between.bytes, between.partners, depth, ofRank, topology.nicLatency);
  limits.intranodeBytes = bestChunkBytes(inside.bytes, inside.partners, depth, topology.linkRate, topology.linkLatency);
  if (internode && intranode) // no tier then waits for the end of the other's round
    limits.intranodeBytes = std::min(limits.intranodeBytes, limits.internodeBytes);
  const int64_t busiest = std::max(between.bytes / limits.internodeBytes, inside.bytes / limits.intranodeBytes);
  if (layout.stagingLimit == 0) {
    if (busiest > kMaxPlanChunks)
      return llvm::createStringError("a rank sends or receives " +
                                     std::to_string(std::max(between.bytes, inside.bytes)) +
                                     " bytes, which is more than 2^24 chunks of at most 64 MiB; use more ranks");
    return limits;
  }
  const int64_t limit = std::max<int64_t>(0, layout.stagingLimit - staged);

  const int64_t slot = limit / 4, room = internode && intranode ? slot / 2 : slot;
  limits.internodeBytes = aligned(std::min(limits.internodeBytes, room));
  limits.intranodeBytes = aligned(std::min(limits.intranodeBytes, room));
  const int64_t total = between.total + inside.total;
  const int64_t least =
      std::min(internode ? limits.internodeBytes : INT64_MAX, intranode ? limits.intranodeBytes : INT64_MAX);
  if (least > 0 && total / least <= kMaxPlanChunks)
    return limits;
  const int64_t parts = internode && intranode ? 8 : 4;
  std::string use = std::to_string(total) + " bytes of messages";
  if (staged > 0)
    use += " beside " + std::to_string(staged) + " bytes that are staged to be quantized, transformed or relayed";
  return llvm::make_error<StagingLimitError>(
      layout.stagingLimit, (total / kMaxPlanChunks + kStagingAlignment) * parts + staged, std::move(use));
}

} // namespace reshard
