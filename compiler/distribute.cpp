// distribute: every tile to every target that wants it, with a source still to be chosen, and on the way where targets
// pass on what they got. What a node lacks enters it once: cut into stripes, one for each of its ranks that want it,
// which exchange them inside the node (as hierarchical collectives do: HiCCL, MSCCL). Between nodes stripes go in
// pipelined chains where the holders' NICs are the bottleneck: a chain of n nodes costs its holder one copy, not n, and
// n - 1 messages of time. One length of chains serves the whole job: of the powers of two, the one whose estimate is
// least. What several ranks want of files is read once: each reads a stripe and passes it on, inside its node and from
// node to node.

#include "compiler/candidates.h"
#include "compiler/exchange.h"
#include "compiler/interner.h"
#include "compiler/message_size.h"
#include "compiler/optimum.h"
#include "compiler/pass.h"
#include "compiler/shard_distribution.h"
#include "compiler/split.h"

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
struct Class {
  unsigned endpoint = 0;
  std::vector<int32_t> holders;            // source places
  std::vector<std::vector<int32_t>> nodes; // the targets on each node without a holder
  std::vector<uint32_t> tiles;
  int64_t bytes = 0;
};

class Distributor {
public:
  explicit Distributor(Module &module)
      : module_(module), layout_(module.layout), candidates_(layout_), splitter_(module) {}

  void run() {
    for (uint32_t t = 0; t < module_.transfers.tiles.size(); ++t)
      sort(t);
    if (layout_.files.megatron)
      asMegatron();
    else if (layout_.endpoints[0].storage)
      readOnce();
    else
      enterOnce();
    module_.transfers.routes = std::move(routes_).take();
    auto &all = module_.transfers.transfers;
    std::stable_sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.tile, a.target, a.first, a.begin) < std::tie(b.tile, b.target, b.first, b.begin);
    });
  }

private:
  /// Targets whose node has a holder, or that need none, get a transfer of their own; the others make a class for each
  /// generation.
  void sort(uint32_t t) {
    const Tile &tile = module_.transfers.tiles[t];
    const Endpoint &target = layout_.endpoints[tile.endpoint];
    const bool files = layout_.endpoints[0].storage && !target.storage && tile.family >= 0;
    const bool stored = target.params[tile.param].converts();
    candidates_.select(tile);
    std::map<std::pair<uint32_t, int64_t>, std::map<int64_t, std::vector<int32_t>>>
        lacking; // by generation and group, then node
    for (int32_t place : tile.targets) {
      // What is converted where it comes cannot be passed on.
      const bool enters = !stored && layout_.topology.ranksPerNode > 0 && candidates_.remote(place) &&
                          candidates_.onNode(candidates_.nodeOf(place)).empty();
      if (enters || (files && !stored && tile.targets.size() > 1)) {
        lacking[{target.generation(place), files ? groupOf(layout_, target, place) : 0}][candidates_.nodeOf(place)]
            .push_back(place);
        continue;
      }
      module_.transfers.transfers.push_back(whole(t, place));
      if (files)
        alone_[target.ranks[place]] += tile.bytes * tile.tensors;
    }
    for (auto &[key, nodes] : lacking) {
      std::vector<std::vector<int32_t>> places;
      for (auto &[node, list] : nodes)
        places.push_back(std::move(list));
      const auto [at, added] =
          numbers_.try_emplace(std::make_tuple(tile.endpoint, candidates_.all(), places), classes_.size());
      if (added)
        classes_.push_back({tile.endpoint, candidates_.all(), std::move(places), {}, 0});
      classes_[at->second].tiles.push_back(t);
      classes_[at->second].bytes += tile.bytes * tile.tensors;
    }
  }

  Transfer whole(uint32_t tile, int32_t target) const {
    Transfer transfer;
    transfer.tile = tile;
    transfer.count = static_cast<uint32_t>(module_.transfers.tiles[tile].tensors);
    transfer.target = target;
    return transfer;
  }

  /// All tensors of a class, to no target yet.
  std::vector<Transfer> everything(const Class &each) const {
    std::vector<Transfer> all;
    for (uint32_t tile : each.tiles)
      all.push_back(whole(tile, 0));
    return all;
  }

  /// Stripes of a class: as many as a node has ranks for them.
  static int64_t stripes(const Class &each) {
    size_t most = 1;
    for (const auto &places : each.nodes)
      most = std::max(most, places.size());
    return std::clamp<int64_t>(each.bytes / kLeastStripe, 1, static_cast<int64_t>(most));
  }

  /// Of 1, 2, 4 … nodes: a chain's length with the least time, by the busiest NIC and the chain's own delay.
  size_t chainLength() const {
    size_t longest = 1, best = 1;
    for (const Class &each : classes_)
      longest = std::max(longest, each.nodes.size());
    std::map<int64_t, int64_t> into; // by NIC
    for (const Class &each : classes_)
      for (const auto &places : each.nodes)
        for (int32_t place : places)
          into[nic(each, place)] += each.bytes / static_cast<int64_t>(places.size());
    int64_t ingress = 0, least = INT64_MAX;
    for (const auto &[nic, bytes] : into)
      ingress = std::max(ingress, bytes);
    for (size_t length = 1; length < 2 * longest; length *= 2) {
      std::map<std::vector<int32_t>, int64_t> heads; // by the holders' NICs
      std::map<int64_t, int64_t> passed;             // by NIC
      for (size_t c = 0; c < classes_.size(); ++c) {
        const Class &each = classes_[c];
        const size_t nodes = each.nodes.size();
        heads[holdersNics(each)] += each.bytes * static_cast<int64_t>((nodes + length - 1) / length);
        for (size_t n = 0; n < nodes; ++n)
          if (n % length + 1 < length && n + 1 < nodes)
            for (int32_t place : each.nodes[(n + c) % nodes])
              passed[nic(each, place)] += each.bytes / static_cast<int64_t>(each.nodes[(n + c) % nodes].size());
      }
      std::vector<int64_t> base(layout_.topology.nic(layout_.world - 1) + 1);
      int64_t egress = 0;
      for (const auto &[nic, bytes] : passed) {
        egress = std::max(egress, bytes);
        base[nic] = bytes;
      }
      std::vector<SendClass> classes;
      for (const auto &[holders, bytes] : heads)
        classes.push_back({holders, bytes});
      egress = std::max(egress, optimum(classes, base).load);
      // Bytes that a NIC could move meanwhile: a message goes on two rounds after it came.
      const auto hops = static_cast<int64_t>(std::min(length, longest)) - 1;
      const int64_t message = bestMessage(ingress, 1, hops, layout_.topology.nicRate, layout_.topology.nicLatency);
      const int64_t estimate = std::max(ingress, egress) + hops * 2 * message;
      if (estimate < least) {
        least = estimate;
        best = length;
      }
    }
    return best;
  }

  std::vector<int32_t> holdersNics(const Class &each) const {
    std::vector<int32_t> nics;
    for (int32_t place : each.holders)
      nics.push_back(static_cast<int32_t>(layout_.topology.nic(layout_.endpoints[0].ranks[place])));
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    return nics;
  }

  int64_t nic(const Class &each, int32_t place) const {
    return layout_.topology.nic(layout_.endpoints[each.endpoint].ranks[place]);
  }

  void enterOnce() {
    const size_t length = chainLength();
    for (size_t c = 0; c < classes_.size(); ++c)
      send(classes_[c], c, length);
  }

  /// Cuts a class into stripes and sends each along its chains. Classes start at different nodes and ranks, so that
  /// what falls to the first and the last is spread.
  void send(const Class &each, size_t number, size_t length) {
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
  void put(const std::vector<Transfer> &parts, Way way) {
    const int32_t known = way.route.empty() ? -1 : static_cast<int32_t>(routes_.intern(std::move(way.route)));
    for (Transfer part : parts) {
      part.target = way.head;
      part.route = known;
      module_.transfers.transfers.push_back(part);
    }
  }

  /// What rank `rank` of node `node` of a class reads.
  struct Reading {
    const Class *of;
    size_t node, rank;
    std::vector<Transfer> parts;
  };

  /// Passes on what was read, as options.exchange says; `auto`: by whichever is estimated to take the least time.
  void passOn(const std::vector<Reading> &readings) {
    Exchange exchange = layout_.files.exchange;
    if (exchange == Exchange::automatic) {
      int64_t least = INT64_MAX;
      for (const Exchange each : {Exchange::nodes, Exchange::p2p, Exchange::broadcast, Exchange::gather_rounds}) {
        ExchangeCost cost(layout_);
        for (const Reading &reading : readings)
          cost.add(layout_.endpoints[reading.of->endpoint], wayOf(each, reading.of->nodes, reading.node, reading.rank),
                   sum(reading.parts));
        if (cost.time() < least) {
          least = cost.time();
          exchange = each;
        }
      }
      module_.layout.files.exchange = exchange;
    }
    for (const Reading &reading : readings)
      put(reading.parts, wayOf(exchange, reading.of->nodes, reading.node, reading.rank));
  }

  int64_t sum(const std::vector<Transfer> &parts) const {
    int64_t all = 0;
    for (const Transfer &part : parts)
      all += bytes(module_.transfers, part);
    return all;
  }

  /// What several ranks want of files: each of them reads some, such that the busiest reads as little as can be.
  void readOnce() {
    std::vector<int64_t> base(layout_.world);
    for (const auto &[rank, bytes] : alone_)
      base[rank] = bytes;
    std::vector<SendClass> readers;
    for (const Class &each : classes_) {
      readers.push_back({{}, each.bytes});
      for (const auto &places : each.nodes)
        for (int32_t place : places)
          readers.back().places.push_back(layout_.endpoints[each.endpoint].ranks[place]);
      std::sort(readers.back().places.begin(), readers.back().places.end());
    }
    const Optimum best = optimum(readers, base);
    std::vector<Reading> readings;
    for (size_t c = 0; c < classes_.size(); ++c) {
      const Class &each = classes_[c];
      std::vector<Transfer> left = everything(each);
      int64_t owed = 0, rest = each.bytes;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size() && rest > 0; ++i) {
          const int32_t rank = layout_.endpoints[each.endpoint].ranks[each.nodes[n][i]];
          const int64_t wanted =
              best.bytes[c][std::lower_bound(readers[c].places.begin(), readers[c].places.end(), rank) -
                            readers[c].places.begin()];
          rest -= wanted;
          owed += wanted;
          std::vector<Transfer> mine;
          if (owed > 0 && wanted > 0)
            take(left, owed, rest == 0, mine);
          owed -= sum(mine);
          if (!mine.empty())
            readings.push_back({&each, n, i, std::move(mine)});
        }
    }
    passOn(readings);
  }

  /// What is read, or written, by Megatron-Core's assignment. (All targets joined at once: --keep goes with the optimum
  /// alone.)
  void asMegatron() {
    std::map<std::pair<uint32_t, int64_t>, const Class *> classOf; // by tile and group
    for (const Class &each : classes_)
      for (uint32_t tile : each.tiles)
        classOf[{tile, groupOf(layout_, layout_.endpoints[each.endpoint], each.nodes[0][0])}] = &each;
    std::map<std::pair<uint32_t, uint32_t>, int32_t> writer; // by tile and tensor
    std::vector<Reading> readings;
    for (const Shard &shard : megatronDistribution(layout_, module_.transfers)) {
      if (!layout_.endpoints[0].storage) {
        writer[{shard.tile, shard.tensor}] = shard.rank;
        continue;
      }
      const auto found = classOf.find({shard.tile, shard.group});
      if (found == classOf.end())
        continue; // one rank alone wants it
      const Class &each = *found->second;
      Transfer part = whole(shard.tile, 0);
      part.first = shard.tensor;
      part.count = 1;
      const std::vector<int32_t> &ranks = layout_.endpoints[each.endpoint].ranks;
      for (size_t n = 0; n < each.nodes.size(); ++n)
        for (size_t i = 0; i < each.nodes[n].size(); ++i)
          if (ranks[each.nodes[n][i]] == shard.rank)
            readings.push_back({&each, n, i, {part}});
    }
    passOn(readings);
    write(writer);
  }

  /// Gives the open transfers to files the writers that were found.
  void write(const std::map<std::pair<uint32_t, uint32_t>, int32_t> &writer) {
    const Endpoint &source = layout_.endpoints[0];
    std::vector<Transfer> all;
    for (const Transfer &transfer : module_.transfers.transfers)
      for (uint32_t tensor = transfer.first; tensor < transfer.first + transfer.count; ++tensor) {
        const auto found = writer.find({transfer.tile, tensor});
        if (found == writer.end()) {
          all.push_back(transfer);
          break;
        }
        Transfer part = transfer;
        part.first = tensor;
        part.count = 1;
        part.source = static_cast<int32_t>(std::find(source.ranks.begin(), source.ranks.end(), found->second) -
                                           source.ranks.begin());
        part.holder = Candidates::holderOf(module_.transfers.tiles[transfer.tile], part.source);
        all.push_back(part);
      }
    module_.transfers.transfers = std::move(all);
  }

  Module &module_;
  const Layout &layout_;
  Candidates candidates_;
  Splitter splitter_;
  std::vector<Class> classes_;
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
