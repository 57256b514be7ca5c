// distribute: every tile to every target that wants it, with a source still to be chosen, and on the way where targets
// pass on what they got. What a node lacks enters it once: cut into stripes, one for each of its ranks that want it,
// which exchange them inside the node (as hierarchical collectives do: HiCCL, MSCCL). Between nodes stripes go in
// pipelined chains where the replicas' NICs are the bottleneck: a chain of n nodes costs its holder one copy, not n,
// and n - 1 messages of time. One length of chains serves the whole job: of the powers of two, the one whose estimate
// is least. What several ranks want of files is read once: each reads a stripe and passes it on, inside its node and
// from node to node.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/transfer/candidates.h"
#include "compiler/transfer/exchange.h"
#include "compiler/transfer/message_size.h"
#include "compiler/transfer/optimum.h"
#include "compiler/transfer/shard_distribution.h"
#include "compiler/transfer/split.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Stripes are not made thinner than this, in bytes.
constexpr int64_t kLeastStripe = 256 << 10;

/// Tiles that the same source places can give, which the same targets lack on the same nodes. Where the source is files
/// nobody has them: one target reads, and passes on.
struct OverlapClass {
  unsigned endpoint = 0;
  std::vector<int32_t> replicas;           // source places
  std::vector<std::vector<int32_t>> nodes; // the targets on each node without a holder
  std::vector<uint32_t> overlaps;
  int64_t bytes = 0;
};

class Distributor {
public:
  explicit Distributor(Module &module)
      : module_(module), layout_(module.layout), candidates_(layout_), splitter_(module) {}

  void run() {
    for (uint32_t t = 0; t < module_.transfers.overlaps.size(); ++t)
      classify(t);
    if (layout_.files.megatron)
      asMegatron();
    else if (layout_.endpoints[0].storage)
      readOnce();
    else
      enterOnce();
    module_.transfers.routes = std::move(routes_).take();
    auto &all = module_.transfers.transfers;
    std::stable_sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.overlap, a.target, a.first, a.begin) < std::tie(b.overlap, b.target, b.first, b.begin);
    });
  }

private:
  /// Targets whose node has a holder, or that need none, get a transfer of their own; the others make a class for each
  /// generation.
  void classify(uint32_t t) {
    const Overlap &overlap = module_.transfers.overlaps[t];
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    const bool files = layout_.endpoints[0].storage && !target.storage && overlap.pattern >= 0;
    const bool converts = target.params[overlap.param].converts();
    candidates_.select(overlap);
    std::map<std::pair<uint32_t, int64_t>, std::map<int64_t, std::vector<int32_t>>>
        missing; // by generation and group, then node
    for (int32_t meshRank : overlap.targets) {
      // What is converted where it comes cannot be passed on.
      const bool enters = !converts && layout_.topology.ranksPerNode > 0 && candidates_.remote(meshRank) &&
                          candidates_.onNode(candidates_.nodeOf(meshRank)).empty();
      if (enters || (files && !converts && overlap.targets.size() > 1)) {
        missing[{target.epoch(meshRank), files ? groupOf(layout_, target, meshRank) : 0}][candidates_.nodeOf(meshRank)]
            .push_back(meshRank);
        continue;
      }
      module_.transfers.transfers.push_back(whole(t, meshRank));
      if (files)
        alone_[target.ranks[meshRank]] += overlap.bytes * overlap.tensors;
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

  /// All tensors of a class, to no target yet.
  std::vector<Transfer> everything(const OverlapClass &each) const {
    std::vector<Transfer> all;
    for (uint32_t overlap : each.overlaps)
      all.push_back(whole(overlap, 0));
    return all;
  }

  /// Stripes of a class: as many as a node has ranks for them.
  static int64_t stripes(const OverlapClass &each) {
    size_t most = 1;
    for (const auto &meshRanks : each.nodes)
      most = std::max(most, meshRanks.size());
    return std::clamp<int64_t>(each.bytes / kLeastStripe, 1, static_cast<int64_t>(most));
  }

  /// Of 1, 2, 4 … nodes: a chain's length with the least time, by the busiest NIC and the chain's own delay.
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
      for (const auto &[replicas, bytes] : heads)
        classes.push_back({replicas, bytes});
      egress = std::max(egress, optimum(classes, base).load);
      // Bytes that a NIC could move meanwhile: a message goes on two rounds after it came.
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
    for (int32_t meshRank : each.replicas)
      nics.push_back(static_cast<int32_t>(layout_.topology.nic(layout_.endpoints[0].ranks[meshRank])));
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    return nics;
  }

  int64_t nic(const OverlapClass &each, int32_t meshRank) const {
    return layout_.topology.nic(layout_.endpoints[each.endpoint].ranks[meshRank]);
  }

  void enterOnce() {
    const size_t length = chainLength();
    for (size_t c = 0; c < classes_.size(); ++c)
      send(classes_[c], c, length);
  }

  /// Cuts a class into stripes and sends each along its chains. Classes start at different nodes and ranks, so that
  /// what falls to the first and the last is spread.
  void send(const OverlapClass &each, size_t number, size_t length) {
    std::vector<Transfer> left = everything(each);
    const int64_t count = stripes(each);
    int64_t done = 0;
    for (int64_t stripe = 0; stripe < count; ++stripe) {
      std::vector<Transfer> mine;
      const int64_t end = static_cast<int64_t>(static_cast<__int128>(each.bytes) * (stripe + 1) / count);
      take(left, end - done, stripe + 1 == count, mine);
      done += sum(mine);
      const size_t nodes = each.nodes.size();
      for (size_t first = 0; first < nodes && !mine.empty(); first += length)
        put(mine, chain(each.nodes, (first + number) % nodes, std::min(length, nodes - first),
                        static_cast<size_t>(stripe) + number));
    }
  }

  /// Moves about `wanted` bytes from the front of `left` to `mine`.
  void take(std::vector<Transfer> &left, int64_t wanted, bool all, std::vector<Transfer> &mine) {
    size_t i = 0;
    std::vector<Transfer> rest;
    for (; i < left.size(); ++i) {
      const int64_t size = bytes(module_.transfers, left[i]);
      if (!all && size > wanted) {
        splitter_.split(left[i], wanted, wanted / 64, mine, rest);
        ++i;
        break;
      }
      mine.push_back(left[i]);
      wanted -= size;
    }
    rest.insert(rest.end(), left.begin() + static_cast<ptrdiff_t>(i), left.end());
    left = std::move(rest);
  }

  /// Transfers to the head of the way, and on from there.
  void put(const std::vector<Transfer> &ranges, BroadcastTree tree) {
    const int32_t known = tree.route.empty() ? -1 : static_cast<int32_t>(routes_.intern(std::move(tree.route)));
    for (Transfer range : ranges) {
      range.target = tree.root;
      range.route = known;
      module_.transfers.transfers.push_back(range);
    }
  }

  /// What rank `rank` of node `node` of a class reads.
  struct Reading {
    const OverlapClass *of;
    size_t node, rank;
    std::vector<Transfer> ranges;
  };

  /// Passes on what was read, as options.exchange says; `auto`: by whichever is estimated to take the least time.
  void forward(const std::vector<Reading> &readings) {
    Exchange exchange = layout_.files.exchange;
    if (exchange == Exchange::automatic) {
      int64_t least = INT64_MAX;
      for (const Exchange each : {Exchange::nodes, Exchange::p2p, Exchange::broadcast, Exchange::gather_rounds}) {
        ExchangeCost cost(layout_);
        for (const Reading &reading : readings)
          cost.add(layout_.endpoints[reading.of->endpoint],
                   broadcastTree(each, reading.of->nodes, reading.node, reading.rank), sum(reading.ranges));
        if (cost.time() < least) {
          least = cost.time();
          exchange = each;
        }
      }
      module_.layout.files.exchange = exchange;
    }
    for (const Reading &reading : readings)
      put(reading.ranges, broadcastTree(exchange, reading.of->nodes, reading.node, reading.rank));
  }

  int64_t sum(const std::vector<Transfer> &ranges) const {
    int64_t all = 0;
    for (const Transfer &range : ranges)
      all += bytes(module_.transfers, range);
    return all;
  }

  /// What several ranks want of files: each of them reads some, such that the busiest reads as little as can be.
  void readOnce() {
    std::vector<int64_t> base(layout_.world);
    for (const auto &[rank, bytes] : alone_)
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
      std::vector<Transfer> left = everything(each);
      int64_t deficit = 0, rest = each.bytes;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size() && rest > 0; ++i) {
          const int32_t rank = layout_.endpoints[each.endpoint].ranks[each.nodes[n][i]];
          const int64_t wanted =
              best.bytes[c][std::lower_bound(readers[c].senders.begin(), readers[c].senders.end(), rank) -
                            readers[c].senders.begin()];
          rest -= wanted;
          deficit += wanted;
          std::vector<Transfer> mine;
          if (deficit > 0 && wanted > 0)
            take(left, deficit, rest == 0, mine);
          deficit -= sum(mine);
          if (!mine.empty())
            readings.push_back({&each, n, i, std::move(mine)});
        }
    }
    forward(readings);
  }

  /// What is read, or written, by Megatron-Core's assignment. (All targets joined at once: --keep goes with the optimum
  /// alone.)
  void asMegatron() {
    std::map<std::pair<uint32_t, int64_t>, const OverlapClass *> classOf; // by tile and group
    for (const OverlapClass &each : classes_)
      for (uint32_t overlap : each.overlaps)
        classOf[{overlap, groupOf(layout_, layout_.endpoints[each.endpoint], each.nodes[0][0])}] = &each;
    std::map<std::pair<uint32_t, uint32_t>, int32_t> writer; // by tile and tensor
    std::vector<Reading> readings;
    for (const Shard &shard : megatronDistribution(layout_, module_.transfers)) {
      if (!layout_.endpoints[0].storage) {
        writer[{shard.overlap, shard.tensor}] = shard.rank;
        continue;
      }
      const auto found = classOf.find({shard.overlap, shard.group});
      if (found == classOf.end())
        continue; // one rank alone wants it
      const OverlapClass &each = *found->second;
      Transfer range = whole(shard.overlap, 0);
      range.first = shard.tensor;
      range.count = 1;
      const std::vector<int32_t> &ranks = layout_.endpoints[each.endpoint].ranks;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size(); ++i)
          if (ranks[each.nodes[n][i]] == shard.rank)
            readings.push_back({&each, n, i, {range}});
    }
    forward(readings);
    write(writer);
  }

  /// Gives the open transfers to files the writers that were found.
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
        Transfer range = transfer;
        range.first = tensor;
        range.count = 1;
        range.source = static_cast<int32_t>(std::find(source.ranks.begin(), source.ranks.end(), found->second) -
                                            source.ranks.begin());
        range.replicaGroup = Candidates::replicaGroupOf(module_.transfers.overlaps[transfer.overlap], range.source);
        all.push_back(range);
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
  std::map<int32_t, int64_t> alone_; // bytes of files that a rank alone wants, by rank
};

} // namespace

std::string distribute(Module &module) {
  Distributor(module).run();
  return {};
}

} // namespace reshard
