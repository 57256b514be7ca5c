// SPDX-License-Identifier: Apache-2.0
// distribute: makes transfers of overlaps, one for each target that needs it (balance chooses their sources), and
// routes by which targets forward bytes that they received. Bytes that a node lacks enter it once: they are cut into
// stripes, one for each of its ranks that need them, and these exchange stripes inside the node (as hierarchical
// collectives do: HiCCL, MSCCL). Between nodes stripes are forwarded along pipelined chains if the replicas' NICs are
// the bottleneck: a chain of n nodes costs the replica one copy instead of n, and adds the time of n - 1 messages. All
// chains of a job have one length: the power of two with the least estimated time. Bytes of files that several ranks
// need are read once: each rank reads a stripe and sends it to the others.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/transfer/candidates.h"
#include "compiler/transfer/lists.h"
#include "compiler/transfer/optimum.h"
#include "compiler/transfer/shard_distribution.h"
#include "compiler/transfer/split.h"
#include "compiler/transfer/staging.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// The mesh rank that receives a transfer first, and the hops from it to the others.
struct BroadcastTree {
  int32_t root = -1;
  Route route;
};

/// A chain of `count` nodes that starts at node `first` and wraps around at the end of `nodes`, which lists the mesh
/// ranks on each node, ascending. In each node the mesh rank with index `stripe` modulo their number receives from the
/// node before and sends to the others.
BroadcastTree chain(const std::vector<std::vector<int32_t>> &nodes, size_t first, size_t count, size_t stripe) {
  BroadcastTree tree;
  int32_t before = -1;
  for (size_t n = 0; n < count; ++n) {
    const std::vector<int32_t> &meshRanks = nodes[(first + n) % nodes.size()];
    const int32_t entry = meshRanks[stripe % meshRanks.size()];
    if (before < 0)
      tree.root = entry;
    else
      tree.route.push_back({before, entry});
    for (int32_t meshRank : meshRanks)
      if (meshRank != entry)
        tree.route.push_back({entry, meshRank});
    before = entry;
  }
  return tree;
}

/// From mesh rank nodes[node][rank], which has the bytes, to all others of `nodes`. `exchange` is not `automatic`.
BroadcastTree broadcastTree(Exchange exchange, const std::vector<std::vector<int32_t>> &nodes, size_t node,
                            size_t rank) {
  if (exchange == Exchange::nodes)
    return chain(nodes, node, nodes.size(), rank);
  BroadcastTree tree{nodes[node][rank], {}};
  std::vector<int32_t> ring; // all mesh ranks, ascending, rotated so that the root is first
  for (const auto &meshRanks : nodes)
    ring.insert(ring.end(), meshRanks.begin(), meshRanks.end());
  std::sort(ring.begin(), ring.end());
  std::rotate(ring.begin(), std::find(ring.begin(), ring.end(), tree.root), ring.end());
  for (size_t n = 1; n < ring.size(); ++n) {
    size_t from = 0;
    if (exchange == Exchange::gather_rounds)
      from = n - 1;
    else if (exchange == Exchange::broadcast) // binomial tree: the parent of n is n without its highest bit
      for (size_t bit = 1; bit <= n; bit *= 2)
        from = n - bit;
    tree.route.push_back({ring[from], ring[n]});
  }
  return tree;
}

/// Estimates the time of several exchanges that run at the same time: the bytes of the busiest port at its rate, plus
/// the delay of the longest route: a latency for each hop, and the time of a chunk (bestChunkBytes) for each hop after
/// the first.
class ExchangeCost {
public:
  explicit ExchangeCost(const Layout &layout) : layout_(layout) {}

  /// Adds `bytes` bytes that pass every hop of `tree`, which names mesh ranks of `endpoint`.
  void add(const Endpoint &endpoint, const BroadcastTree &tree, int64_t bytes);

  /// The estimate in nanoseconds.
  int64_t time() const;

private:
  const Layout &layout_;
  std::map<std::pair<int32_t, int32_t>, int64_t> pairs_; // bytes by sender and receiver (world ranks)
  int64_t hops_ = 0;                                     // how many hops the longest route has
};

void ExchangeCost::add(const Endpoint &endpoint, const BroadcastTree &tree, int64_t bytes) {
  std::map<int32_t, int64_t> depth; // by mesh rank
  for (const Hop &hop : tree.route) {
    pairs_[{endpoint.ranks[hop.from], endpoint.ranks[hop.to]}] += bytes;
    hops_ = std::max(hops_, depth[hop.to] = depth[hop.from] + 1);
  }
}

int64_t ExchangeCost::time() const {
  const Topology &topology = layout_.topology;
  struct Port {
    int64_t bytes = 0;
    std::vector<int64_t> messages; // bytes, by partner
  };
  std::map<std::pair<int64_t, bool>, Port>
      ports[2]; // by link tier (inside nodes, between nodes); by rank or NIC, sends
  for (const auto &[pair, bytes] : pairs_) {
    const bool internode = topology.node(pair.first) != topology.node(pair.second);
    for (const bool sends : {true, false}) {
      const int64_t rank = sends ? pair.first : pair.second;
      Port &port = ports[internode][{internode ? topology.nic(rank) : rank, sends}];
      port.bytes += bytes;
      port.messages.push_back(bytes);
    }
  }
  int64_t slowest = 0;
  for (const bool internode : {false, true}) {
    const int64_t rate = internode ? topology.nicRate : topology.linkRate;
    const int64_t latency = internode ? topology.nicLatency : topology.linkLatency;
    auto time = [&](int64_t bytes) {
      return static_cast<int64_t>(static_cast<__int128>(bytes) * 1'000'000'000 / rate);
    };
    for (const auto &[key, port] : ports[internode]) {
      const int64_t partners = static_cast<int64_t>(port.messages.size());
      const int64_t message = bestChunkBytes(port.bytes, partners, hops_ - 1, rate, latency);
      const int64_t largest = std::min(message, *std::max_element(port.messages.begin(), port.messages.end()));
      // Each hop after the first delays the bytes by one message.
      slowest = std::max(slowest, time(port.bytes) + hops_ * latency + (hops_ - 1) * time(largest));
    }
  }
  return slowest;
}

/// The smallest stripe, in bytes.
constexpr int64_t kMinStripeBytes = 256 << 10;

/// Overlaps with the same source replicas and the same targets, on nodes that hold no replica. If the source is files,
/// one target reads them and forwards them to the others.
struct OverlapClass {
  unsigned endpoint = 0;
  std::vector<int32_t> replicas;           // source mesh ranks
  std::vector<std::vector<int32_t>> nodes; // the target mesh ranks on each node without a replica
  std::vector<uint32_t> overlaps;
  int64_t bytes = 0;
};

class Distributor {
public:
  explicit Distributor(Module &module)
      : module_(module), layout_(module.layout), candidates_(layout_), splitter_(module) {}

  void run() {
    size_t most = 0;
    for (const Overlap &overlap : module_.transfers.overlaps)
      most += overlap.targets.size();
    module_.transfers.transfers.reserve(most); // a vector of gigabytes that grows would be copied
    for (uint32_t t = 0; t < module_.transfers.overlaps.size(); ++t)
      classify(t);
    if (layout_.files.megatron)
      assignAsMegatron();
    else if (layout_.endpoints[0].storage)
      readOnce();
    else
      sendOncePerNode();
    module_.transfers.routes = std::move(routes_).take();
    sortUnlessSorted(module_.transfers.transfers, [](const Transfer &a, const Transfer &b) {
      return std::tie(a.overlap, a.target, a.first, a.begin) < std::tie(b.overlap, b.target, b.first, b.begin);
    });
  }

private:
  /// A target gets a separate transfer if a replica is on its node, or if it needs no other rank. The other targets
  /// form a class for each epoch (and, if the source is files, for each group).
  void classify(uint32_t t) {
    const Overlap &overlap = module_.transfers.overlaps[t];
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    const bool files = layout_.endpoints[0].storage && !target.storage && overlap.pattern >= 0;
    const bool converts = target.params[overlap.param].converts();
    candidates_.select(overlap);
    std::map<std::pair<uint32_t, int64_t>, std::map<int64_t, std::vector<int32_t>>>
        missing; // by epoch and group, then by node
    for (int32_t meshRank : overlap.targets) {
      // Bytes that are converted on arrival cannot be forwarded.
      const bool enters = !converts && layout_.topology.ranksPerNode > 0 && candidates_.remote(meshRank) &&
                          candidates_.onNode(candidates_.nodeOf(meshRank)).empty();
      if (enters || (files && !converts && overlap.targets.size() > 1)) {
        missing[{target.epoch(meshRank), files ? groupOf(layout_, target, meshRank) : 0}][candidates_.nodeOf(meshRank)]
            .push_back(meshRank);
        continue;
      }
      module_.transfers.transfers.push_back(whole(t, meshRank));
      if (files)
        singleReaderBytes_[target.ranks[meshRank]] += overlap.bytes * overlap.tensors;
    }
    for (auto &[key, nodes] : missing) {
      std::vector<std::vector<int32_t>> meshRanks;
      for (auto &[node, list] : nodes)
        meshRanks.push_back(std::move(list));
      const auto [at, added] =
          numbers_.try_emplace(std::make_tuple(overlap.endpoint, candidates_.all(), meshRanks), classes_.size());
      if (added)
        classes_.push_back({overlap.endpoint, candidates_.all(), std::move(meshRanks), {}, 0});
      classes_[at->second].overlaps.push_back(t);
      classes_[at->second].bytes += overlap.bytes * overlap.tensors;
    }
  }

  Transfer whole(uint32_t overlap, int32_t target) const {
    Transfer transfer;
    transfer.overlap = overlap;
    transfer.count = static_cast<uint32_t>(module_.transfers.overlaps[overlap].tensors);
    transfer.target = target;
    return transfer;
  }

  /// All tensors of a class; put() sets their targets.
  std::vector<Transfer> transfersOf(const OverlapClass &each) const {
    std::vector<Transfer> all;
    all.reserve(each.overlaps.size());
    for (uint32_t overlap : each.overlaps)
      all.push_back(whole(overlap, 0));
    return all;
  }

  /// The number of stripes of a class: at most the number of its targets on one node.
  static int64_t stripes(const OverlapClass &each) {
    size_t most = 1;
    for (const auto &meshRanks : each.nodes)
      most = std::max(most, meshRanks.size());
    return std::clamp<int64_t>(each.bytes / kMinStripeBytes, 1, static_cast<int64_t>(most));
  }

  /// The length of a chain (1, 2, 4 … nodes) with the least estimated time: that of the busiest NIC plus the chain's
  /// delay.
  size_t chainLength() const {
    size_t longest = 1, best = 1;
    for (const OverlapClass &each : classes_)
      longest = std::max(longest, each.nodes.size());
    std::map<int64_t, int64_t> into; // by NIC
    for (const OverlapClass &each : classes_)
      for (const auto &meshRanks : each.nodes)
        for (int32_t meshRank : meshRanks)
          into[nic(each, meshRank)] += each.bytes / static_cast<int64_t>(meshRanks.size());
    int64_t ingress = 0, least = INT64_MAX;
    for (const auto &[nic, bytes] : into)
      ingress = std::max(ingress, bytes);
    for (size_t length = 1; length < 2 * longest; length *= 2) {
      std::map<std::vector<int32_t>, int64_t> heads; // by the replicas' NICs
      std::map<int64_t, int64_t> passed;             // by NIC
      for (size_t c = 0; c < classes_.size(); ++c) {
        const OverlapClass &each = classes_[c];
        const size_t nodes = each.nodes.size();
        heads[replicaNics(each)] += each.bytes * static_cast<int64_t>((nodes + length - 1) / length);
        for (size_t n = 0; n < nodes; ++n)
          if (n % length + 1 < length && n + 1 < nodes)
            for (int32_t meshRank : each.nodes[(n + c) % nodes])
              passed[nic(each, meshRank)] += each.bytes / static_cast<int64_t>(each.nodes[(n + c) % nodes].size());
      }
      std::vector<int64_t> base(layout_.topology.nic(layout_.world - 1) + 1);
      int64_t egress = 0;
      for (const auto &[nic, bytes] : passed) {
        egress = std::max(egress, bytes);
        base[nic] = bytes;
      }
      std::vector<SendClass> classes;
      classes.reserve(heads.size());
      for (const auto &[replicas, bytes] : heads)
        classes.push_back({replicas, bytes});
      egress = std::max(egress, optimum(classes, base).load);
      // The delay, as bytes that a NIC could move in it: a message is forwarded two rounds after the round it arrived
      // in.
      const auto hops = static_cast<int64_t>(std::min(length, longest)) - 1;
      const int64_t message = bestChunkBytes(ingress, 1, hops, layout_.topology.nicRate, layout_.topology.nicLatency);
      const int64_t estimate = std::max(ingress, egress) + hops * 2 * message;
      if (estimate < least) {
        least = estimate;
        best = length;
      }
    }
    return best;
  }

  std::vector<int32_t> replicaNics(const OverlapClass &each) const {
    std::vector<int32_t> nics;
    nics.reserve(each.replicas.size());
    for (int32_t meshRank : each.replicas)
      nics.push_back(static_cast<int32_t>(layout_.topology.nic(layout_.endpoints[0].ranks[meshRank])));
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    return nics;
  }

  int64_t nic(const OverlapClass &each, int32_t meshRank) const {
    return layout_.topology.nic(layout_.endpoints[each.endpoint].ranks[meshRank]);
  }

  void sendOncePerNode() {
    const size_t length = chainLength();
    for (size_t c = 0; c < classes_.size(); ++c)
      send(classes_[c], c, length);
  }

  /// Cuts a class into stripes and sends each along its chains. Classes start at different nodes and ranks: the first
  /// and the last of a chain have other loads than the others, and this balances them.
  void send(const OverlapClass &each, size_t number, size_t length) {
    std::vector<Transfer> left = transfersOf(each);
    const int64_t count = stripes(each);
    int64_t done = 0;
    for (int64_t stripe = 0; stripe < count; ++stripe) {
      std::vector<Transfer> part;
      const int64_t end = static_cast<int64_t>(static_cast<__int128>(each.bytes) * (stripe + 1) / count);
      splitter_.take(left, end - done, stripe + 1 == count, part);
      done += bytesOf(part);
      const size_t nodes = each.nodes.size();
      for (size_t first = 0; first < nodes && !part.empty(); first += length)
        put(part, chain(each.nodes, (first + number) % nodes, std::min(length, nodes - first),
                        static_cast<size_t>(stripe) + number));
    }
  }

  /// Appends transfers to the root of a tree, with its route.
  void put(const std::vector<Transfer> &transfers, BroadcastTree tree) {
    const int32_t number = tree.route.empty() ? -1 : static_cast<int32_t>(routes_.intern(std::move(tree.route)));
    for (Transfer transfer : transfers) {
      transfer.target = tree.root;
      transfer.route = number;
      module_.transfers.transfers.push_back(transfer);
    }
  }

  /// The transfers that mesh rank of->nodes[node][rank] reads from files.
  struct Reading {
    const OverlapClass *of;
    size_t node, rank;
    std::vector<Transfer> transfers;
  };

  /// Makes the routes by which transfers are forwarded after reading, as options.exchange says. `auto` chooses the
  /// exchange with the least estimated time.
  void forward(const std::vector<Reading> &readings) {
    Exchange exchange = layout_.files.exchange;
    if (exchange == Exchange::automatic) {
      int64_t least = INT64_MAX;
      for (const Exchange each : {Exchange::nodes, Exchange::p2p, Exchange::broadcast, Exchange::gather_rounds}) {
        ExchangeCost cost(layout_);
        for (const Reading &reading : readings)
          cost.add(layout_.endpoints[reading.of->endpoint],
                   broadcastTree(each, reading.of->nodes, reading.node, reading.rank), bytesOf(reading.transfers));
        if (cost.time() < least) {
          least = cost.time();
          exchange = each;
        }
      }
      module_.layout.files.exchange = exchange;
    }
    for (const Reading &reading : readings)
      put(reading.transfers, broadcastTree(exchange, reading.of->nodes, reading.node, reading.rank));
  }

  int64_t bytesOf(const std::vector<Transfer> &transfers) const {
    int64_t all = 0;
    for (const Transfer &transfer : transfers)
      all += bytes(module_.transfers, transfer);
    return all;
  }

  /// Divides the bytes of files that several ranks need among these ranks, so that the busiest one reads as little as
  /// possible.
  void readOnce() {
    std::vector<int64_t> base(layout_.world);
    for (const auto &[rank, bytes] : singleReaderBytes_)
      base[rank] = bytes;
    std::vector<SendClass> readers;
    for (const OverlapClass &each : classes_) {
      readers.push_back({{}, each.bytes});
      for (const auto &meshRanks : each.nodes)
        for (int32_t meshRank : meshRanks)
          readers.back().senders.push_back(layout_.endpoints[each.endpoint].ranks[meshRank]);
      std::sort(readers.back().senders.begin(), readers.back().senders.end());
    }
    const Optimum best = optimum(readers, base);
    std::vector<Reading> readings;
    for (size_t c = 0; c < classes_.size(); ++c) {
      const OverlapClass &each = classes_[c];
      std::vector<Transfer> left = transfersOf(each);
      int64_t deficit = 0, rest = each.bytes;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size() && rest > 0; ++i) {
          const int32_t rank = layout_.endpoints[each.endpoint].ranks[each.nodes[n][i]];
          const int64_t wanted =
              best.bytes[c][std::lower_bound(readers[c].senders.begin(), readers[c].senders.end(), rank) -
                            readers[c].senders.begin()];
          rest -= wanted;
          deficit += wanted;
          std::vector<Transfer> part;
          if (deficit > 0 && wanted > 0)
            splitter_.take(left, deficit, rest == 0, part);
          deficit -= bytesOf(part);
          if (!part.empty())
            readings.push_back({&each, n, i, std::move(part)});
        }
    }
    forward(readings);
  }

  /// Assigns reading or writing of files as Megatron-Core does. (There is one epoch: --keep excludes this option.)
  void assignAsMegatron() {
    std::map<std::pair<uint32_t, int64_t>, const OverlapClass *> classOf; // by overlap and group
    for (const OverlapClass &each : classes_)
      for (uint32_t overlap : each.overlaps)
        classOf[{overlap, groupOf(layout_, layout_.endpoints[each.endpoint], each.nodes[0][0])}] = &each;
    std::map<std::pair<uint32_t, uint32_t>, int32_t> writer; // world rank, by overlap and tensor
    std::vector<Reading> readings;
    for (const Shard &shard : megatronDistribution(layout_, module_.transfers)) {
      if (!layout_.endpoints[0].storage) {
        writer[{shard.overlap, shard.tensor}] = shard.rank;
        continue;
      }
      const auto found = classOf.find({shard.overlap, shard.group});
      if (found == classOf.end())
        continue; // only one rank needs it: classify() made its transfer
      const OverlapClass &each = *found->second;
      Transfer transfer = whole(shard.overlap, 0);
      transfer.first = shard.tensor;
      transfer.count = 1;
      const std::vector<int32_t> &ranks = layout_.endpoints[each.endpoint].ranks;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size(); ++i)
          if (ranks[each.nodes[n][i]] == shard.rank)
            readings.push_back({&each, n, i, {transfer}});
    }
    if (layout_.endpoints[0].storage)
      forward(readings);
    else
      sendOncePerNode(); // to targets on ranks: no file is read or written for them
    write(writer);
  }

  /// Sets the sources of transfers to files. `writer`: world ranks by overlap and tensor.
  void write(const std::map<std::pair<uint32_t, uint32_t>, int32_t> &writer) {
    const Endpoint &source = layout_.endpoints[0];
    std::vector<Transfer> all;
    for (const Transfer &transfer : module_.transfers.transfers)
      for (uint32_t tensor = transfer.first; tensor < transfer.first + transfer.count; ++tensor) {
        const auto found = writer.find({transfer.overlap, tensor});
        if (found == writer.end()) {
          all.push_back(transfer);
          break;
        }
        Transfer assigned = transfer;
        assigned.first = tensor;
        assigned.count = 1;
        assigned.source = static_cast<int32_t>(std::find(source.ranks.begin(), source.ranks.end(), found->second) -
                                               source.ranks.begin());
        assigned.replicaGroup =
            Candidates::replicaGroupOf(module_.transfers.overlaps[transfer.overlap], assigned.source);
        all.push_back(assigned);
      }
    module_.transfers.transfers = std::move(all);
  }

  Module &module_;
  const Layout &layout_;
  Candidates candidates_;
  Splitter splitter_;
  std::vector<OverlapClass> classes_;
  std::map<std::tuple<unsigned, std::vector<int32_t>, std::vector<std::vector<int32_t>>>, size_t> numbers_;
  Interner<Route> routes_;
  std::map<int32_t, int64_t> singleReaderBytes_; // by world rank: bytes of files that only this rank needs
};

} // namespace

llvm::Error distribute(Module &module) {
  Distributor(module).run();
  return llvm::Error::success();
}

} // namespace reshard
