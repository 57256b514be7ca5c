// SPDX-License-Identifier: Apache-2.0
// Tries chunk sizes for both link tiers: small chunks waste less of each message's last round, large ones need fewer
// rounds. The staging limit bounds both.
#include "compiler/schedule/message_plan.h"

#include "compiler/transfer/staging.h"

#include "llvm/ADT/DenseMap.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace reshard {

namespace {

/// Rounds of a chunk between nodes; more would cost the compiler time.
constexpr int64_t kMaxRounds = 16;
/// Links inside nodes have so many times the rounds that they need, if they are fast enough. With fewer, forwarded
/// chunks queue up, and the queue is still there when the last chunk has arrived.
constexpr int64_t kRoom = 2;
/// fittedChunkBytes() compares the larger half of so many chunk sizes, for a tier of at most so many pairs.
constexpr int64_t kChunkSizes = 128;
constexpr size_t kMaxFittedPairs = 1 << 16;
/// If the busiest port has fewer flows, their last chunks are a small part of its bytes.
constexpr int64_t kFewFlows = 8;
/// Smaller chunks must save 1 / kWorth of the bytes, and no chunk is smaller than needed to save all but 1 / kNearly.
constexpr int64_t kWorth = 128, kNearly = 1024;

/// The bytes and the flows of a port.
struct Load {
  int64_t bytes = 0, flows = 0;
};

/// What the flows of a link tier send.
struct TierLoad {
  int64_t total = 0;                                          // bytes
  Load most;                                                  // the most bytes, and the most flows, of any port
  llvm::DenseMap<std::pair<int32_t, int32_t>, int64_t> pairs; // bytes by sender and receiver, if these are not too many
  bool many = false;                                          // there are more than kMaxFittedPairs pairs
};

/// The loads of all flows.
struct Loads {
  TierLoad internode, intranode;
  int64_t depth = 0; // hops after the first on the longest route
};

Loads loadsOf(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t copies) {
  const ir::Topology &topology = layout.topology;
  Loads result;
  std::vector<std::array<Load, 2>> ports[2]; // by tier and rank: of its receives and of its sends
  for (auto &tier : ports)
    tier.resize(static_cast<size_t>(layout.world));
  for (const Flow &flow : flows) {
    llvm::SmallVector<int64_t, 4> depths(flow.hops.size());
    for (size_t h = 0; h < flow.hops.size(); ++h) {
      const Flow::Hop &hop = flow.hops[h];
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      if (hop.after >= 0)
        depths[h] = depths[hop.after] + 1;
      result.depth = std::max(result.depth, depths[h]);
      TierLoad &tier = local ? result.intranode : result.internode;
      tier.total += flow.bytes * copies;
      for (const bool sends : {true, false}) {
        Load &port = ports[local][sends ? hop.from : hop.to][sends];
        port.bytes += flow.bytes * (sends ? copies : 1);
        port.flows += sends ? copies : 1;
        tier.most.bytes = std::max(tier.most.bytes, port.bytes);
        tier.most.flows = std::max(tier.most.flows, port.flows);
      }
      if (tier.many)
        continue;
      tier.pairs[{hop.from, hop.to}] += flow.bytes;
      if (tier.pairs.size() * static_cast<size_t>(copies) > kMaxFittedPairs) {
        tier.many = true;
        tier.pairs.clear();
      }
    }
  }
  return result;
}

/// The pairs of a tier by one of their ranks, those with equal bytes together.
class PairSizes {
public:
  PairSizes(const TierLoad &tier, bool senders) {
    llvm::DenseMap<std::pair<int32_t, int64_t>, size_t> known; // rank, bytes
    for (const auto &[ranks, bytes] : tier.pairs) {
      const int32_t rank = senders ? ranks.first : ranks.second;
      const auto [at, added] = known.try_emplace({rank, bytes}, sizes_.size());
      if (added)
        sizes_.push_back({rank, bytes, 0});
      ++sizes_[at->second].pairs;
      ranks_ = std::max(ranks_, static_cast<size_t>(rank) + 1);
    }
  }

  /// The most chunks of this size that a rank sends or receives, if each pair begins with a whole one.
  int64_t most(int64_t size) const {
    std::vector<int64_t> chunks(ranks_);
    int64_t most = 0;
    for (const Size &each : sizes_)
      most = std::max(most, chunks[each.rank] += (each.bytes + size - 1) / size * each.pairs);
    return most;
  }

private:
  struct Size {
    int32_t rank;
    int64_t bytes, pairs;
  };
  std::vector<Size> sizes_;
  size_t ranks_ = 0;
};

int64_t aligned(int64_t bytes) { return bytes / kStagingAlignment * kStagingAlignment; }

/// The chunk size of a tier. bestChunkBytes() assumes that half of each pair's last chunk is not used. Here the bytes
/// of each pair are known: if most pairs have 17.3 chunks of the best size, 18 slightly smaller ones leave no time
/// unused. Of the sizes in [best / 2, best], the result is the largest one that gives the busiest port nearly the
/// fewest bytes, counting each chunk as a whole one.
int64_t fittedChunkBytes(const TierLoad &tier, int64_t copies, int64_t depth, int64_t rate, int64_t latency) {
  const int64_t best = bestChunkBytes(tier.most.bytes, tier.most.flows, depth, rate, latency);
  if (tier.most.flows < kFewFlows || tier.many)
    return best;
  const PairSizes senders(tier, true), receivers(tier, false);
  std::vector<std::pair<int64_t, int64_t>> sizes; // size of a chunk, bytes of the busiest port; the largest size first
  for (int64_t part = kChunkSizes; part >= kChunkSizes / 2; --part) {
    const int64_t size = aligned(best / kChunkSizes * part);
    if (size < kMinMessageBytes)
      break;
    sizes.emplace_back(size, std::max(senders.most(size) * copies, receivers.most(size)) * size);
  }
  const auto least = std::min_element(sizes.begin(), sizes.end(), [](auto &a, auto &b) { return a.second < b.second; });
  if (sizes.empty() || sizes.front().second - least->second < least->second / kWorth)
    return best;
  const int64_t enough = least->second + least->second / kNearly;
  return std::find_if(sizes.begin(), sizes.end(), [&](auto &each) { return each.second <= enough; })->first;
}

/// The rounds of a chunk between nodes, each of which a chunk inside a node takes. `fast`: the chunks that a link sends
/// while a NIC sends one.
uint32_t internodeRounds(const TierLoad &between, const TierLoad &inside, int64_t fast) {
  const int64_t needed = (inside.most.bytes + between.most.bytes - 1) / between.most.bytes;
  if (needed == 1) // with more rounds, links would wait for each chunk, and every forwarded chunk would be a message
    return 1;
  return static_cast<uint32_t>(std::clamp<int64_t>(std::max(needed, std::min(kRoom * needed, fast)), 1, kMaxRounds));
}

} // namespace

llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged,
                                        int64_t copies) {
  const ir::Topology &topology = layout.topology;
  const auto [between, inside, depth] = loadsOf(flows, layout, copies);
  const bool internode = between.total > 0, intranode = inside.total > 0;
  RoundLimits limits;
  const int64_t ofRank = topology.nicRate / topology.ranksOfNic(); // several ranks share a NIC
  limits.internodeBytes = fittedChunkBytes(between, copies, depth, ofRank, topology.nicLatency);
  limits.intranodeBytes = fittedChunkBytes(inside, copies, depth, topology.linkRate, topology.linkLatency);
  if (internode && intranode) {
    // No tier then waits for the end of the other's round.
    limits.intranodeBytes = std::min(limits.intranodeBytes, limits.internodeBytes);
    const __int128 link = static_cast<__int128>(limits.internodeBytes) * topology.linkRate,
                   nic = static_cast<__int128>(limits.intranodeBytes) * ofRank;
    limits.internodeRounds = internodeRounds(between, inside, static_cast<int64_t>(link / nic));
  }
  const int64_t busiest =
      std::max(between.most.bytes / limits.internodeBytes, inside.most.bytes / limits.intranodeBytes);
  if (layout.stagingLimit == 0) {
    if (busiest > kMaxPlanChunks)
      return llvm::createStringError("a rank sends or receives " +
                                     std::to_string(std::max(between.most.bytes, inside.most.bytes)) +
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
