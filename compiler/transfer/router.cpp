// SPDX-License-Identifier: Apache-2.0
// Builds a tree for each parcel of a class, hop by hop, at prices that follow the load, and rebuilds those over busy
// resources.
#include "compiler/transfer/router.h"

#include <algorithm>
#include <array>

namespace reshard {

namespace {

constexpr int64_t kSecond = 1'000'000'000'000; // picoseconds
/// Longer times and larger ratios of rates count as these, so that sums of a few fit into 64 bits.
constexpr int64_t kMaxTime = INT64_MAX / 8, kMaxRatio = 1 << 10;

/// Prices are tabulated in so many steps up to the goal, and as many again beyond it; at the goal a resource costs
/// e^kSteepness times as much as an idle one.
constexpr int64_t kSteps = 256, kSteepness = 12;
/// A parcel takes about 1 / kParcels of the goal; the least and the most parcels of a class.
constexpr int64_t kParcels = 4, kMaxParcels = 256;
constexpr int64_t kMinParcelBytes = 64 << 10;
/// Sweeps with parcels of one size, halvings of the parcels, and sweeps without an improvement after which they are
/// halved.
constexpr int kSweeps = 10, kHalvings = 3, kIdleSweeps = 3;
/// Routes are good enough if they take at most 1 / kEnough more than the least time.
constexpr int64_t kEnough = 128;
/// What a rank's second hop of a tree over the same link or NIC costs more, in prices of a resource at the goal: it has
/// to be worth that the rank alternates between two others, for which it needs many messages. A chain needs few.
constexpr int64_t kBranchPrice = 250;

/// 2^10 e^(kSteepness load / goal), by steps.
std::array<int64_t, 2 * kSteps + 1> makePrices() {
  constexpr int kFraction = 30; // bits
  __int128 step = 0, term = __int128{1} << kFraction;
  for (int k = 1; term > 0; ++k) { // the series of e^(kSteepness / kSteps)
    step += term;
    term = term * kSteepness / kSteps / k;
  }
  std::array<int64_t, 2 * kSteps + 1> prices{};
  __int128 price = __int128{1} << (10 + kFraction);
  for (int64_t &each : prices) {
    each = static_cast<int64_t>(price >> kFraction);
    price = price * step >> kFraction;
  }
  return prices;
}

struct Parcel {
  size_t byteClass = 0;
  int64_t bytes = 0;
  std::vector<RankHop> hops;
};

class Router {
public:
  Router(const Topology &topology, const std::vector<ByteClass> &classes, NetworkLoad &load)
      : topology_(topology), classes_(classes), load_(load), prices_(makePrices()), capacity_(load.resources()),
        sends_(static_cast<size_t>(load.ranks())), state_(static_cast<size_t>(load.nodes())) {}

  std::vector<std::vector<RoutedParcel>> run() {
    least_ = std::max(leastRouteTime(topology_, load_.ranks(), classes_), load_.busiest());
    setGoal(least_);
    makeParcels();
    for (Parcel &parcel : parcels_)
      build(parcel);
    best_ = parcels_;
    time_ = load_.busiest();
    for (int halving = 0; halving <= kHalvings && !good(); ++halving)
      if (halving > 0 && !halve())
        break;
      else
        improve();
    return result();
  }

private:
  bool good() const { return time_ <= least_ + least_ / kEnough; }

  void setGoal(int64_t goal) {
    for (size_t i = 0; i < capacity_.size(); ++i)
      capacity_[i] = std::max<int64_t>(1, load_.capacity(i, goal));
  }

  void add(const Parcel &parcel, int64_t bytes) {
    for (const RankHop &hop : parcel.hops)
      load_.add(hop, bytes);
  }
  void remove(const Parcel &parcel) { add(parcel, -parcel.bytes); }

  void makeParcels() {
    for (size_t c = 0; c < classes_.size(); ++c) {
      const ByteClass &each = classes_[c];
      const bool crosses = std::any_of(each.wanters.begin(), each.wanters.end(), [&](int32_t wanter) {
        return std::none_of(each.holders.begin(), each.holders.end(),
                            [&](int32_t holder) { return load_.node(holder) == load_.node(wanter); });
      });
      const size_t slowest = load_.out(each.holders[0], !crosses);
      const int64_t most = std::max(kMinParcelBytes, capacity_[slowest] / kParcels);
      const int64_t count = std::clamp<int64_t>((each.bytes + most - 1) / most, 1, kMaxParcels);
      for (int64_t i = 0; i < count; ++i)
        parcels_.push_back({c, each.bytes * (i + 1) / count - each.bytes * i / count, {}});
    }
  }

  bool uses(const Parcel &parcel, int64_t time) const { // a resource that is used at least so long
    return std::any_of(parcel.hops.begin(), parcel.hops.end(), [&](const RankHop &hop) {
      const bool link = load_.node(hop.from) == load_.node(hop.to);
      return load_.time(load_.out(hop.from, link)) >= time || load_.time(load_.in(hop.to, link)) >= time;
    });
  }

  /// Builds trees over busy resources anew, until that does not help.
  void improve() {
    for (int sweep = 0, idle = 0; sweep < kSweeps && idle < kIdleSweeps && !good(); ++sweep) {
      setGoal(std::max(least_, time_ - time_ / 50));
      const int64_t now = load_.busiest(), busy = now - now / (sweep % 2 == 0 ? 20 : 4);
      for (Parcel &parcel : parcels_)
        if (uses(parcel, busy)) {
          remove(parcel);
          build(parcel);
        }
      const int64_t time = load_.busiest();
      idle = time < time_ - time_ / 500 ? 0 : idle + 1;
      if (time < time_) {
        time_ = time;
        best_ = parcels_;
      }
    }
    for (const Parcel &parcel : parcels_)
      remove(parcel);
    parcels_ = best_;
    for (const Parcel &parcel : parcels_)
      add(parcel, parcel.bytes);
  }

  /// Halves the parcels over the busiest resources. Returns false if none can be halved.
  bool halve() {
    const int64_t busy = time_ - time_ / 20;
    std::vector<Parcel> finer;
    for (const Parcel &parcel : parcels_) {
      finer.push_back(parcel);
      if (parcel.bytes < 2 * kMinParcelBytes || !uses(parcel, busy))
        continue;
      finer.back().bytes = parcel.bytes / 2;
      finer.push_back(parcel);
      finer.back().bytes = parcel.bytes - parcel.bytes / 2;
    }
    const bool any = finer.size() > parcels_.size();
    parcels_ = std::move(finer);
    best_ = parcels_;
    return any;
  }

  // ------------------------------------------------------------------------------------------------------- one tree

  /// The ranks of a tree on one node, and the cheapest hops from and to them.
  struct Node {
    std::vector<int32_t> members, open; // ranks that have the bytes, and those that still want them
    bool stale = true;
    int64_t linkOut = 0, nicOut = 0, linkIn = 0, nicIn = 0; // prices
    int32_t linkFrom = -1, nicFrom = -1, linkTo = -1, nicTo = -1;
  };

  /// Whether a rank sends in the tree.
  struct Sends {
    bool byLink = false, byNic = false;
  };

  int64_t price(size_t resource) const {
    const int64_t bytes = load_.bytes(resource) + bytes_;
    const int64_t step = static_cast<int64_t>(static_cast<__int128>(bytes) * kSteps / capacity_[resource]);
    const int64_t fastest = std::max(topology_.linkRate, topology_.nicRate);
    const auto ratio = static_cast<int64_t>(
        std::min<__int128>(static_cast<__int128>(fastest) * 64 / load_.rate(resource), kMaxRatio * 64));
    return prices_[static_cast<size_t>(std::min(step, 2 * kSteps))] * ratio;
  }
  void refresh(Node &node) const {
    node.stale = false;
    node.linkOut = node.nicOut = INT64_MAX;
    const int64_t branch = kBranchPrice * prices_[kSteps];
    for (const int32_t rank : node.members) {
      const Sends &sends = sends_[static_cast<size_t>(rank)];
      const int64_t link = price(load_.out(rank, true)) + (sends.byLink ? branch : 0),
                    nic = price(load_.out(rank, false)) + (sends.byNic ? branch : 0);
      if (link < node.linkOut) {
        node.linkOut = link;
        node.linkFrom = rank;
      }
      if (nic < node.nicOut) {
        node.nicOut = nic;
        node.nicFrom = rank;
      }
    }
    node.linkIn = node.nicIn = INT64_MAX;
    for (const int32_t rank : node.open) {
      if (const int64_t link = price(load_.in(rank, true)); link < node.linkIn) {
        node.linkIn = link;
        node.linkTo = rank;
      }
      if (const int64_t nic = price(load_.in(rank, false)); nic < node.nicIn) {
        node.nicIn = nic;
        node.nicTo = rank;
      }
    }
  }

  Node &nodeOf(int32_t rank) {
    const int32_t number = load_.node(rank);
    if (std::find(nodes_.begin(), nodes_.end(), number) == nodes_.end()) {
      nodes_.push_back(number);
      state_[static_cast<size_t>(number)] = {};
    }
    return state_[static_cast<size_t>(number)];
  }

  /// Makes the hops of a parcel, and adds its load.
  void build(Parcel &parcel) {
    const ByteClass &each = classes_[parcel.byteClass];
    parcel.hops.clear();
    bytes_ = parcel.bytes;
    nodes_.clear();
    for (const int32_t holder : each.holders)
      nodeOf(holder).members.push_back(holder);
    for (const int32_t wanter : each.wanters)
      nodeOf(wanter).open.push_back(wanter);
    while (parcel.hops.size() < each.wanters.size()) {
      const RankHop hop = cheapest();
      parcel.hops.push_back(hop);
      load_.add(hop, parcel.bytes);
      Sends &sends = sends_[static_cast<size_t>(hop.from)];
      (load_.node(hop.from) == load_.node(hop.to) ? sends.byLink : sends.byNic) = true;
      Node &to = state_[static_cast<size_t>(load_.node(hop.to))];
      std::erase(to.open, hop.to);
      to.members.push_back(hop.to);
      to.stale = state_[static_cast<size_t>(load_.node(hop.from))].stale = true;
    }
    for (const auto *ranks : {&each.holders, &each.wanters})
      for (const int32_t rank : *ranks)
        sends_[static_cast<size_t>(rank)] = {};
  }

  /// The cheapest hop from a rank of the tree to one that is not.
  RankHop cheapest() {
    const Node *first = nullptr, *second = nullptr; // with the cheapest ways out by NIC
    for (const int32_t number : nodes_) {
      Node &node = state_[static_cast<size_t>(number)];
      if (node.stale)
        refresh(node);
      if (node.members.empty())
        continue;
      if (!first || node.nicOut < first->nicOut) {
        second = first;
        first = &node;
      } else if (!second || node.nicOut < second->nicOut) {
        second = &node;
      }
    }
    int64_t least = INT64_MAX;
    RankHop best;
    for (const int32_t number : nodes_) {
      const Node &node = state_[static_cast<size_t>(number)];
      if (node.open.empty())
        continue;
      if (!node.members.empty() && node.linkOut + node.linkIn < least) {
        least = node.linkOut + node.linkIn;
        best = {node.linkFrom, node.linkTo};
      }
      if (const Node *from = first != &node ? first : second; from && from->nicOut + node.nicIn < least) {
        least = from->nicOut + node.nicIn;
        best = {from->nicFrom, node.nicTo};
      }
    }
    return best;
  }

  /// Parcels with equal trees are one.
  std::vector<std::vector<RoutedParcel>> result() const {
    std::vector<std::vector<RoutedParcel>> result(classes_.size());
    for (const Parcel &parcel : parcels_) {
      std::vector<RoutedParcel> &ofClass = result[parcel.byteClass];
      const auto same = std::find_if(ofClass.begin(), ofClass.end(),
                                     [&](const RoutedParcel &each) { return each.hops == parcel.hops; });
      if (same == ofClass.end())
        ofClass.push_back({parcel.bytes, parcel.hops});
      else
        same->bytes += parcel.bytes;
    }
    return result;
  }

  const Topology &topology_;
  const std::vector<ByteClass> &classes_;
  NetworkLoad &load_; // includes all parcels
  const std::array<int64_t, 2 * kSteps + 1> prices_;
  std::vector<int64_t> capacity_; // by resource: the bytes of the goal
  std::vector<Parcel> parcels_, best_;
  int64_t least_ = 0, time_ = 0; // picoseconds: no routes take less; the busiest resource of best_
  // The tree that is built:
  int64_t bytes_ = 0;
  std::vector<Sends> sends_;   // by rank
  std::vector<int32_t> nodes_; // their numbers
  std::vector<Node> state_;    // by node
};

} // namespace

NetworkLoad::NetworkLoad(const Topology &topology, int64_t world)
    : topology_(topology), ofNode_(static_cast<size_t>(topology.node(world - 1)) + 1),
      nics_(topology.nic(world - 1) + 1), bytes_(static_cast<size_t>(2 * (world + nics_))) {
  for (int64_t rank = 0; rank < world; ++rank) {
    node_.push_back(static_cast<int32_t>(topology.node(rank)));
    nic_.push_back(static_cast<int32_t>(topology.nic(rank)));
    ofNode_[static_cast<size_t>(node_.back())].push_back(static_cast<int32_t>(rank));
  }
}

int64_t NetworkLoad::time(int64_t bytes, int64_t rate) {
  const __int128 time = static_cast<__int128>(bytes) * kSecond / rate;
  return static_cast<int64_t>(std::min<__int128>(time, kMaxTime));
}

int64_t NetworkLoad::capacity(size_t resource, int64_t time) const {
  return static_cast<int64_t>(static_cast<__int128>(time) * rate(resource) / kSecond);
}

void NetworkLoad::add(const RankHop &hop, int64_t bytes) {
  const bool link = node(hop.from) == node(hop.to);
  bytes_[out(hop.from, link)] += bytes;
  bytes_[in(hop.to, link)] += bytes;
}

int64_t NetworkLoad::busiest() const {
  int64_t most = 0;
  for (size_t i = 0; i < bytes_.size(); ++i)
    most = std::max(most, time(i));
  return most;
}

int64_t leastRouteTime(const Topology &topology, int64_t world, const std::vector<ByteClass> &classes) {
  const NetworkLoad network(topology, world);
  std::vector<int64_t> intoRank(static_cast<size_t>(world)), intoNode(static_cast<size_t>(network.nodes()));
  for (const ByteClass &each : classes) {
    std::vector<int32_t> nodes;
    for (const int32_t wanter : each.wanters) {
      intoRank[static_cast<size_t>(wanter)] += each.bytes;
      nodes.push_back(network.node(wanter));
    }
    for (const int32_t holder : each.holders)
      std::erase(nodes, network.node(holder));
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    for (const int32_t node : nodes)
      intoNode[static_cast<size_t>(node)] += each.bytes;
  }
  int64_t most = 0;
  const int64_t ofRank = topology.linkRate + (network.nodes() > 1 ? topology.nicRate : 0);
  for (const int64_t bytes : intoRank)
    most = std::max(most, NetworkLoad::time(bytes, ofRank));
  for (int32_t node = 0; node < network.nodes(); ++node)
    most =
        std::max(most, NetworkLoad::time(intoNode[static_cast<size_t>(node)], network.nicsOf(node) * topology.nicRate));
  return most;
}

std::vector<std::vector<RoutedParcel>> route(const Topology &topology, const std::vector<ByteClass> &classes,
                                             NetworkLoad &load) {
  return Router(topology, classes, load).run();
}

} // namespace reshard
