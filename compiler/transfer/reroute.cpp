// SPDX-License-Identifier: Apache-2.0
// reroute: replaces the routes of a job that keep a link or a NIC busy for 1.5 times as long as those that the router
// finds (router.h). distribute and balance choose routes by rules, which fit regular jobs: bytes enter a
// node by the NICs of the ranks that want them, and come from a node that has them or from the replica that has sent
// least. They do not see that a rank serves all others of its node alone, or that several ranks share a NIC. In jobs
// that they fit, their routes are better than the router's: they have fewer pairs of ranks and fewer parcels.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/transfer/candidates.h"
#include "compiler/transfer/router.h"
#include "compiler/transfer/split.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// None of 120 random jobs (tests/bounds) takes longer by the router's routes if the rules take 1.5 times as long.
constexpr int64_t kWorthHalves = 3;

/// Overlaps of one endpoint with the same source mesh ranks and the same target mesh ranks, none of which holds them.
struct RoutedClass {
  unsigned endpoint = 0;
  std::vector<int32_t> sources, targets;
  std::vector<uint32_t> overlaps;
};

class Rerouter {
public:
  explicit Rerouter(Module &module)
      : module_(module), layout_(module.layout), candidates_(layout_), splitter_(module) {}

  void run() {
    classify();
    NetworkLoad now(layout_.topology, layout_.world), kept = now; // kept: what is not routed
    for (const Transfer &transfer : module_.transfers.transfers) {
      add(transfer, now);
      if (!isRouted(transfer))
        add(transfer, kept);
    }
    std::vector<ByteClass> classes;
    for (const RoutedClass &each : classes_)
      classes.push_back(byteClass(each));
    const int64_t time = timeOf(now);
    if (2 * time < kWorthHalves * std::max(timeOf(kept), leastRouteTime(layout_.topology, layout_.world, classes)))
      return;
    const std::vector<std::vector<RoutedParcel>> parcels = route(layout_.topology, classes, kept);
    if (2 * time >= kWorthHalves * timeOf(kept))
      replace(parcels);
  }

private:
  static constexpr uint32_t kNone = UINT32_MAX;

  bool isRouted(const Transfer &transfer) const {
    return classOf_[transfer.overlap] != kNone && rankOf(0, transfer.source) != targetRank(transfer);
  }
  int32_t rankOf(unsigned endpoint, int32_t meshRank) const {
    const Endpoint &each = layout_.endpoints[endpoint];
    return meshRank < 0 || each.storage ? -1 : each.ranks[static_cast<size_t>(meshRank)];
  }
  int32_t targetRank(const Transfer &transfer) const {
    return rankOf(module_.transfers.overlaps[transfer.overlap].endpoint, transfer.target);
  }

  /// Makes the classes. Bytes that are converted on arrival keep their routes: they cannot be forwarded.
  void classify() {
    std::map<std::tuple<unsigned, std::vector<int32_t>, std::vector<int32_t>>, uint32_t> numbers;
    classOf_.assign(module_.transfers.overlaps.size(), kNone);
    for (uint32_t t = 0; t < classOf_.size(); ++t) {
      const Overlap &overlap = module_.transfers.overlaps[t];
      const Endpoint &target = layout_.endpoints[overlap.endpoint];
      if (overlap.pattern < 0 || target.storage || target.params[overlap.param].converts())
        continue;
      candidates_.select(overlap);
      std::vector<int32_t> targets;
      for (const int32_t meshRank : overlap.targets)
        if (candidates_.remote(meshRank))
          targets.push_back(meshRank);
      if (targets.empty())
        continue;
      const auto [at, added] = numbers.try_emplace(std::make_tuple(overlap.endpoint, candidates_.all(), targets),
                                                   static_cast<uint32_t>(classes_.size()));
      if (added)
        classes_.push_back({overlap.endpoint, candidates_.all(), std::move(targets), {}});
      classes_[at->second].overlaps.push_back(t);
      classOf_[t] = at->second;
    }
  }

  ByteClass byteClass(const RoutedClass &each) const {
    ByteClass result;
    for (const int32_t meshRank : each.sources)
      result.holders.push_back(rankOf(0, meshRank));
    for (const int32_t meshRank : each.targets)
      result.wanters.push_back(rankOf(each.endpoint, meshRank));
    std::sort(result.holders.begin(), result.holders.end());
    std::sort(result.wanters.begin(), result.wanters.end());
    for (const uint32_t t : each.overlaps)
      result.bytes += module_.transfers.overlaps[t].bytes * module_.transfers.overlaps[t].tensors;
    return result;
  }

  /// Adds the hops of a transfer between ranks.
  void add(const Transfer &transfer, NetworkLoad &load) const {
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const int32_t from = rankOf(0, transfer.source), to = targetRank(transfer);
    const int64_t size = bytes(module_.transfers, transfer);
    if (from >= 0 && to >= 0 && from != to)
      load.add({from, to}, size);
    if (transfer.route >= 0)
      for (const Hop &hop : module_.transfers.routes[transfer.route])
        load.add({rankOf(overlap.endpoint, hop.from), rankOf(overlap.endpoint, hop.to)}, size);
  }

  /// Picoseconds of the busiest link or NIC. Relays will even out what the NICs of a node send.
  int64_t timeOf(const NetworkLoad &load) const {
    int64_t most = 0;
    for (int32_t rank = 0; rank < layout_.world; ++rank)
      most = std::max(
          {most, load.time(load.out(rank, true)), load.time(load.in(rank, true)), load.time(load.in(rank, false))});
    for (int32_t node = 0; node < load.nodes(); ++node) {
      int64_t bytes = 0;
      int32_t before = -1;
      for (const int32_t rank : load.ranksOf(node)) {
        if (before < 0 || load.out(rank, false) != load.out(before, false))
          bytes += load.bytes(load.out(rank, false));
        before = rank;
      }
      most = std::max(most, NetworkLoad::time(bytes, load.nicsOf(node) * layout_.topology.nicRate));
    }
    return most;
  }

  /// Replaces the routed transfers.
  void replace(const std::vector<std::vector<RoutedParcel>> &parcels) {
    std::vector<Transfer> &all = module_.transfers.transfers;
    std::erase_if(all, [&](const Transfer &transfer) { return isRouted(transfer); });
    for (Transfer &transfer : all)
      if (transfer.route >= 0)
        transfer.route = static_cast<int32_t>(routes_.intern(Route(module_.transfers.routes[transfer.route])));
    for (size_t c = 0; c < classes_.size(); ++c)
      put(classes_[c], parcels[c]);
    module_.transfers.routes = std::move(routes_).take();
    std::sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.overlap, a.target, a.first, a.begin) < std::tie(b.overlap, b.target, b.first, b.begin);
    });
  }

  /// Adds the transfers of a class, cut into its parcels.
  void put(const RoutedClass &each, const std::vector<RoutedParcel> &parcels) {
    std::vector<Transfer> left;
    for (const uint32_t t : each.overlaps) {
      Transfer &transfer = left.emplace_back();
      transfer.overlap = t;
      transfer.count = static_cast<uint32_t>(module_.transfers.overlaps[t].tensors);
    }
    std::map<int32_t, int32_t> sourceOn, targetOn; // mesh ranks, by rank
    for (const int32_t meshRank : each.sources)
      sourceOn[rankOf(0, meshRank)] = meshRank;
    for (const int32_t meshRank : each.targets)
      targetOn[rankOf(each.endpoint, meshRank)] = meshRank;
    int64_t done = 0, end = 0;
    for (const RoutedParcel &parcel : parcels) {
      std::vector<Transfer> transfers;
      end += parcel.bytes;
      splitter_.take(left, end - done, &parcel == &parcels.back(), transfers);
      for (const Transfer &transfer : transfers)
        done += bytes(module_.transfers, transfer);
      put(transfers, parcel.hops, sourceOn, targetOn);
    }
  }

  /// Adds the transfers of a parcel: one for each hop from a holder, with the hops that follow it as its route.
  void put(const std::vector<Transfer> &transfers, const std::vector<RankHop> &hops,
           const std::map<int32_t, int32_t> &sourceOn, const std::map<int32_t, int32_t> &targetOn) {
    std::map<int32_t, size_t> treeOf; // by rank
    std::vector<std::pair<RankHop, Route>> trees;
    for (const RankHop &hop : hops) {
      const auto before = treeOf.find(hop.from);
      treeOf[hop.to] = before == treeOf.end() ? trees.size() : before->second;
      if (before == treeOf.end())
        trees.emplace_back(hop, Route());
      else
        trees[before->second].second.push_back({targetOn.at(hop.from), targetOn.at(hop.to)});
    }
    for (auto &[first, tree] : trees) {
      const int32_t source = sourceOn.at(first.from),
                    number = tree.empty() ? -1 : static_cast<int32_t>(routes_.intern(std::move(tree)));
      for (Transfer transfer : transfers) {
        transfer.source = source;
        transfer.replicaGroup = Candidates::replicaGroupOf(module_.transfers.overlaps[transfer.overlap], source);
        transfer.target = targetOn.at(first.to);
        transfer.route = number;
        module_.transfers.transfers.push_back(transfer);
      }
    }
  }

  Module &module_;
  const Layout &layout_;
  Candidates candidates_;
  Splitter splitter_;
  std::vector<RoutedClass> classes_;
  std::vector<uint32_t> classOf_; // by overlap; kNone: its transfers stay
  Interner<Route> routes_;
};

} // namespace

llvm::Error reroute(Module &module) {
  const Layout &layout = module.layout;
  const bool extends = std::any_of(layout.endpoints.begin(), layout.endpoints.end(),
                                   [](const Endpoint &endpoint) { return !endpoint.epochs.empty(); });
  // Targets that joined earlier keep their sources. Engine replicas read from the sources when they want to.
  if (layout.topology.ranksPerNode > 0 && !layout.endpoints[0].storage && !layout.files.megatron && !extends &&
      !layout.pool())
    Rerouter(module).run();
  return llvm::Error::success();
}

} // namespace reshard
