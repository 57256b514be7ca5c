// SPDX-License-Identifier: Apache-2.0
// Chooses chunk sizes for both link tiers. Small chunks waste less of each message's last round and pass sooner through
// long routes; too small ones cannot keep a port busy, since a message has two slots. The staging limit bounds both.
#include "compiler/schedule/message_plan.h"

#include "compiler/transfer/staging.h"

#include "llvm/ADT/DenseMap.h"

#include <algorithm>
#include <array>

namespace reshard {

namespace {

/// Rounds of a chunk between nodes; more would cost the compiler time.
constexpr int64_t kMaxRounds = 16;
/// Links inside nodes have so many times the rounds that they need, if they are fast enough. With fewer, forwarded
/// chunks queue up, and the queue is still there when the last chunk has arrived.
constexpr int64_t kRoom = 2;
/// All of the time, in leastChunkBytes().
constexpr int64_t kWhole = 1024;
/// No chunk is smaller, except with a staging limit: sending one costs a transport some microseconds.
constexpr int64_t kMinChunkBytes = 256 << 10;
/// A route with hops after the first delays its last byte by 1 / kDelay of the busiest port's time. Chunks are not made
/// smaller for this than for so many chunks of a plan: the compiler's time grows with their number.
constexpr int64_t kDelay = 64, kMaxChunks = 1 << 18;
/// fittedChunkBytes() compares the larger half of so many chunk sizes, for a tier of at most so many pairs.
constexpr int64_t kChunkSizes = 128;
constexpr size_t kMaxFittedPairs = 1 << 16;
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
  int64_t depth = 0;                                          // hops of this tier after its first one on a route
  llvm::DenseMap<std::pair<int32_t, int32_t>, int64_t> pairs; // bytes by sender and receiver, if these are not too many
  bool many = false;                                          // there are more than kMaxFittedPairs pairs
};

/// The loads of all flows.
struct Loads {
  TierLoad internode, intranode;
  int64_t nicBytes = 0; // the most bytes that a NIC sends or receives
};

Loads loadsOf(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t copies) {
  const ir::Topology &topology = layout.topology;
  Loads result;
  std::vector<std::array<Load, 2>> ports[2]; // by tier and rank: of its receives and of its sends
  for (auto &tier : ports)
    tier.resize(static_cast<size_t>(layout.world));
  std::vector<std::array<int64_t, 2>> nics(static_cast<size_t>(topology.nic(layout.world - 1)) + 1); // bytes
  for (const Flow &flow : flows) {
    llvm::SmallVector<std::array<int64_t, 2>, 4> hops(flow.hops.size()); // by tier, up to the end of each hop
    for (size_t h = 0; h < flow.hops.size(); ++h) {
      const Flow::Hop &hop = flow.hops[h];
      const bool local = topology.node(hop.from) == topology.node(hop.to);
      TierLoad &tier = local ? result.intranode : result.internode;
      if (hop.after >= 0)
        hops[h] = hops[hop.after];
      tier.depth = std::max(tier.depth, hops[h][local]++);
      tier.total += flow.bytes * copies;
      for (const bool sends : {true, false}) {
        const int32_t rank = sends ? hop.from : hop.to;
        Load &port = ports[local][rank][sends];
        port.bytes += flow.bytes * (sends ? copies : 1);
        port.flows += sends ? copies : 1;
        tier.most.bytes = std::max(tier.most.bytes, port.bytes);
        tier.most.flows = std::max(tier.most.flows, port.flows);
        if (!local) {
          int64_t &nic = nics[static_cast<size_t>(topology.nic(rank))][sends];
          result.nicBytes = std::max(result.nicBytes, nic += flow.bytes * (sends ? copies : 1));
        }
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

/// How fast a port moves chunks: bytes per second, nanoseconds; and how fast its rank packs and unpacks them.
struct PortSpeed {
  int64_t rate, latency, copyRate;
};

/// The least chunk with which a port can be busy `busy` / kWhole of the time. While the chunk of one slot is sent,
/// arrives a latency later and is copied, only the chunk of the other slot can be sent: two chunks take this time.
int64_t leastChunkBytes(int64_t busy, const PortSpeed &port) {
  const __int128 during = static_cast<__int128>(port.rate) * port.latency / 1'000'000'000, copy = port.copyRate;
  const __int128 rest = 2 * kWhole * copy - busy * (copy + port.rate); // less than nothing if copies are too slow
  const __int128 bytes = busy * during * copy / std::max(rest, kWhole * copy / 8);
  return alignUp(static_cast<int64_t>(std::clamp<__int128>(bytes, kMinChunkBytes, kMaxMessageBytes)));
}

/// The chunk size of a tier with a rate of `port`. Three sizes bound it from above: bestChunkBytes(), which assumes
/// that half of each pair's last chunk is not used; the size with which routes are short pipelines (each hop takes a
/// chunk's time, and one more until the chunk is unpacked); `fewest` bounds the latter from below. With twice
/// leastChunkBytes() ports need not wait. The bytes of each pair are known: if most pairs have 17.3 chunks of this
/// size, 18 slightly smaller ones leave no time unused. Of the sizes in [best / 2, best], the result is the largest one
/// that gives the busiest port nearly the fewest bytes, counting each chunk as a whole one.
int64_t fittedChunkBytes(const TierLoad &tier, int64_t copies, int64_t fewest, const PortSpeed &port) {
  int64_t best = bestChunkBytes(tier.most.bytes, tier.most.flows, 0, port.rate, port.latency);
  if (tier.depth > 0)
    best = std::min(best, std::max(tier.most.bytes / (2 * tier.depth * kDelay), fewest));
  best = aligned(std::clamp(best, std::min(2 * leastChunkBytes(kWhole, port), kMaxMessageBytes), kMaxMessageBytes));
  if (tier.many)
    return best;
  const PairSizes senders(tier, true), receivers(tier, false);
  std::vector<std::pair<int64_t, int64_t>> sizes; // size of a chunk, bytes of the busiest port; the largest size first
  for (int64_t part = kChunkSizes; part >= kChunkSizes / 2; --part) {
    const int64_t size = aligned(best / kChunkSizes * part);
    sizes.emplace_back(size, std::max(senders.most(size) * copies, receivers.most(size)) * size);
  }
  const auto least = std::min_element(sizes.begin(), sizes.end(), [](auto &a, auto &b) { return a.second < b.second; });
  if (sizes.front().second - least->second < least->second / kWorth)
    return best;
  const int64_t enough = least->second + least->second / kNearly;
  return std::find_if(sizes.begin(), sizes.end(), [&](auto &each) { return each.second <= enough; })->first;
}

/// The rounds of a chunk between nodes, each of which a chunk inside a node takes. `nicRate`: of the rank with the most
/// bytes between nodes.
uint32_t internodeRounds(const Loads &loads, const RoundLimits &limits, int64_t nicRate, int64_t linkRate) {
  const __int128 inside = static_cast<__int128>(loads.intranode.most.bytes) * limits.internodeBytes,
                 between = static_cast<__int128>(loads.internode.most.bytes) * limits.intranodeBytes;
  const auto needed = static_cast<int64_t>((inside + between - 1) / between);
  if (needed == 1) // with more rounds, links would wait for each chunk, and every forwarded chunk would be a message
    return 1;
  const auto fast = static_cast<int64_t>(static_cast<__int128>(limits.internodeBytes) * linkRate /
                                         (static_cast<__int128>(limits.intranodeBytes) * nicRate));
  return static_cast<uint32_t>(std::clamp<int64_t>(std::min(kRoom * needed, fast), 1, kMaxRounds));
}

} // namespace

llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged,
                                        int64_t copies) {
  const ir::Topology &topology = layout.topology;
  const Loads loads = loadsOf(flows, layout, copies);
  const TierLoad &between = loads.internode, &inside = loads.intranode;
  const bool internode = between.total > 0, intranode = inside.total > 0;
  const int64_t total = between.total + inside.total;
  // Several ranks share a NIC, but one that has most of its bytes has most of its time.
  const int64_t ofRank = topology.nicRate / topology.ranksOfNic(),
                ofBusiest = internode ? std::max(ofRank, static_cast<int64_t>(static_cast<__int128>(topology.nicRate) *
                                                                              between.most.bytes / loads.nicBytes))
                                      : ofRank;
  const PortSpeed link{topology.linkRate, topology.linkLatency, topology.copyRate};
  RoundLimits limits;
  limits.internodeBytes =
      fittedChunkBytes(between, copies, total / kMaxChunks, {ofBusiest, topology.nicLatency, topology.copyRate});
  limits.intranodeBytes = fittedChunkBytes(inside, copies, total / kMaxChunks, link);
  if (internode && intranode) {
    // No tier waits for the end of the other's round if their chunks are equal. Only links that are nearly the limit
    // need chunks that suit their pairs; and larger ones, if chunks between nodes are too small to keep links busy.
    const __int128 links = static_cast<__int128>(inside.most.bytes) * topology.nicRate,
                   nics = static_cast<__int128>(loads.nicBytes) * topology.linkRate;
    const auto busy = static_cast<int64_t>(std::min<__int128>(kWhole, kRoom * kWhole * links / nics));
    limits.intranodeBytes =
        std::max(busy < kWhole ? limits.internodeBytes : std::min(limits.intranodeBytes, limits.internodeBytes),
                 leastChunkBytes(busy, link));
    limits.internodeRounds = internodeRounds(loads, limits, ofRank, topology.linkRate);
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
