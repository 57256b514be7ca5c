#include "compiler/round_limits.h"

#include "compiler/message_size.h"
#include "compiler/staging.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace reshard {

namespace {

constexpr int64_t kMostRounds = 8;
constexpr int64_t kMostChunks = 1 << 24; // of a plan that a small limit cuts up

/// The busiest port of a tier.
struct Load {
  int64_t total = 0, bytes = 0, partners = 0;
};

int64_t aligned(int64_t bytes) { return bytes / kStagingAlignment * kStagingAlignment; }

} // namespace

std::string roundLimits(const std::vector<Stream> &streams, const ir::Layout &layout, int64_t gathered,
                        RoundLimits &limits) {
  const ir::Topology &topology = layout.topology;
  Load loads[2]; // between nodes, inside them
  std::map<std::pair<int64_t, bool>, Load> ports[2];
  int64_t depth = 0;
  for (const Stream &stream : streams) {
    std::vector<int64_t> depths(stream.hops.size());
    for (size_t h = 0; h < stream.hops.size(); ++h) {
      const Stream::Hop &hop = stream.hops[h];
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      if (hop.after >= 0)
        depths[h] = depths[hop.after] + 1;
      depth = std::max(depth, depths[h]);
      loads[local].total += stream.bytes;
      for (const bool sends : {true, false}) {
        const int64_t rank = sends ? hop.from : hop.to;
        Load &port = ports[local][{rank, sends}];
        port.bytes += stream.bytes;
        ++port.partners;
        loads[local].bytes = std::max(loads[local].bytes, port.bytes);
        loads[local].partners = std::max(loads[local].partners, port.partners);
      }
    }
  }
  const bool far = loads[0].total > 0, near = loads[1].total > 0;
  limits.rounds = far && near ? static_cast<uint32_t>(std::clamp<int64_t>(
                                    (loads[1].bytes + loads[0].bytes - 1) / loads[0].bytes, 1, kMostRounds))
                              : 1;
  const int64_t ofRank = topology.nicRate / topology.ranksOfNic(); // of its NIC, which they share
  limits.bytes = bestMessage(loads[0].bytes, loads[0].partners, depth, ofRank, topology.nicLatency);
  limits.localBytes = bestMessage(loads[1].bytes, loads[1].partners, depth, topology.linkRate, topology.linkLatency);
  if (far && near) // so that neither tier waits for the other's round to end
    limits.localBytes = std::min(limits.localBytes, limits.bytes);
  const int64_t busiest = std::max(loads[0].bytes / limits.bytes, loads[1].bytes / limits.localBytes);
  if (layout.stagingLimit == 0)
    return busiest <= kMostChunks
               ? std::string()
               : "a rank sends or receives " + std::to_string(std::max(loads[0].bytes, loads[1].bytes)) +
                     " bytes, more than 2^24 chunks of at most 64 MiB";
  const int64_t limit = std::max<int64_t>(0, layout.stagingLimit - gathered);

  const int64_t slot = limit / 4, share = far && near ? slot / 2 : slot;
  limits.bytes = aligned(std::min(limits.bytes, share));
  limits.localBytes = aligned(std::min(limits.localBytes, share));
  const int64_t total = loads[0].total + loads[1].total;
  const int64_t least = std::min(far ? limits.bytes : INT64_MAX, near ? limits.localBytes : INT64_MAX);
  if (least > 0 && total / least <= kMostChunks)
    return {};
  const int64_t parts = far && near ? 8 : 4;
  return stagingTooSmall(layout.stagingLimit) + " for " + std::to_string(total) + " bytes of messages" +
         (gathered > 0
              ? " beside " + std::to_string(gathered) + " bytes that are gathered to be quantised or transformed"
              : "") +
         ", expected at least " +
         std::to_string(std::max<int64_t>(kStagingAlignment, total / kMostChunks + kStagingAlignment) * parts +
                        gathered) +
         " bytes";
}

} // namespace reshard
