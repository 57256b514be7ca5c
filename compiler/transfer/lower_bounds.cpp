// SPDX-License-Identifier: Apache-2.0
// Adds up, over all cells of wanted elements, the bytes that must come into each rank and node, and those that must
// leave one of several ranks or nodes.
#include "compiler/transfer/lower_bounds.h"

#include "compiler/transfer/candidates.h"
#include "compiler/transfer/optimum.h"
#include "compiler/transfer/wanted_cells.h"
#include "ir/copies.h"

#include "llvm/ADT/MapVector.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// The fractional optimum of the busiest of `count` senders (mesh ranks, ranks or NICs). `bytes`: how many each
/// list of candidates must send.
int64_t load(const std::map<std::vector<int32_t>, int64_t> &bytes, int64_t count) {
  std::vector<SendClass> classes;
  classes.reserve(bytes.size());
  for (const auto &[meshRanks, sum] : bytes)
    classes.push_back({meshRanks, sum});
  return optimum(classes, std::vector<int64_t>(count)).load;
}

} // namespace

int64_t egressBound(const Layout &layout, const Transfers &transfers) {
  Candidates candidates(layout);
  const int64_t each = Copies(layout).each();
  std::map<std::vector<int32_t>, int64_t> bytes; // by candidates
  llvm::MapVector<const std::vector<int32_t> *, int64_t> ofOverlap;
  const Overlap *overlap = nullptr;
  auto finish = [&] {
    for (const auto &[meshRanks, sum] : ofOverlap)
      bytes[*meshRanks] += sum;
    ofOverlap.clear();
  };
  for (const Transfer &transfer : transfers.transfers) {
    if (overlap != &transfers.overlaps[transfer.overlap]) {
      finish();
      overlap = &transfers.overlaps[transfer.overlap];
      candidates.select(*overlap);
    }
    if (!candidates.remote(transfer.target))
      continue;
    const std::vector<int32_t> &preferred = candidates.preferred(transfer.target);
    const bool follows = transfer.source == Transfer::kUnassigned ||
                         std::binary_search(preferred.begin(), preferred.end(), transfer.source);
    ofOverlap[follows ? &preferred : &candidates.all()] += ir::bytes(transfers, transfer) * each;
  }
  finish();
  return load(bytes, layout.endpoints[0].meshRanks());
}

namespace {

template <class T> void sortUnique(std::vector<T> &list) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

/// The nodes and NICs of a job.
class Network {
public:
  explicit Network(const Layout &layout)
      : topology_(layout.topology), world_(layout.world), nicsOf_(topology_.node(layout.world - 1) + 1) {
    for (int64_t rank = 0; rank < world_; ++rank) {
      std::vector<int32_t> &ofNode = nicsOf_[node(rank)];
      if (const auto nic = static_cast<int32_t>(topology_.nic(rank)); ofNode.empty() || ofNode.back() != nic)
        ofNode.push_back(nic);
    }
    severalNodes_ = nicsOf_.size() > 1 || (layout.pool() && topology_.ranksPerNode > 0);
  }

  int32_t nodes() const { return static_cast<int32_t>(nicsOf_.size()); }
  bool severalNodes() const { return severalNodes_; }
  int32_t node(int64_t rank) const { return static_cast<int32_t>(topology_.node(rank)); }
  /// The NICs of a node's ranks.
  const std::vector<int32_t> &nicsOf(int32_t node) const { return nicsOf_[node]; }
  int32_t firstRank(int32_t node) const { return static_cast<int32_t>(node * topology_.ranksPerNode); }
  /// The rank after the last of a node.
  int32_t endRank(int32_t node) const {
    return static_cast<int32_t>(topology_.ranksPerNode > 0 ? std::min(world_, (node + 1) * topology_.ranksPerNode)
                                                           : world_);
  }
  /// Whether another rank is on a rank's node.
  bool hasLink(int64_t rank) const { return endRank(node(rank)) - firstRank(node(rank)) > 1; }

private:
  const Topology &topology_;
  const int64_t world_;
  std::vector<std::vector<int32_t>> nicsOf_; // by node
  bool severalNodes_ = false;
};

/// Keeps the cut of each kind that takes longest.
class LargestCuts {
public:
  explicit LargestCuts(const Topology &topology) : topology_(topology) {}
  void add(const Cut &cut) {
    const auto [at, added] = cuts_.try_emplace(cut.kind, cut);
    if (!added && at->second.seconds(topology_) < cut.seconds(topology_))
      at->second = cut;
  }
  std::vector<Cut> take() const {
    std::vector<Cut> result;
    for (const auto &[kind, cut] : cuts_)
      if (cut.bytes > 0)
        result.push_back(cut);
    return result;
  }

private:
  const Topology &topology_;
  std::map<CutKind, Cut> cuts_;
};

/// The storage form of a target's elements.
struct WantedForm {
  bool converts = false, senderConverts = false; // on arrival, or at the sender if the plan likes
  int64_t bytes = 0, elements = 1;               // bytes of so many elements
};

WantedForm formOf(const Param &param) {
  if (param.storageDtype)
    return {true, false, itemBytes(*param.storageDtype), 1};
  if (!param.view || param.view->kind != ViewKind::elements)
    return {};
  const QuantizedFormat &format = formatOf(param.view->format);
  const int64_t block = format.blockRows * format.blockColumns;
  return {true, format.sendersCanQuantize(), block / format.codesPerByte() + format.scaleBytes(), block};
}

/// What some ranks want of a cell.
struct Want {
  bool unconverted = false, senderConverts = true;
  int64_t converted = 0; // the bytes of the widest converted form

  void add(const Want &other) {
    unconverted = unconverted || other.unconverted;
    senderConverts = senderConverts && other.senderConverts;
    converted = std::max(converted, other.converted);
  }
  bool converts() const { return converted > 0; }
  /// The bytes of the narrowest form that suffices, of `sent` bytes. `converters`: whether ranks that could send them
  /// want them in a converted form.
  int64_t least(int64_t sent, bool converters) const {
    return unconverted || !(senderConverts || converters) ? sent : std::min(sent, converted);
  }
};

/// A rank that wants a cell.
struct Wanter {
  int32_t rank = 0;
  bool holds = false;
  int64_t positions = 0;
  Want want;
};

/// Ranks of one node, by bits.
using RankSet = llvm::SmallVector<uint64_t, 2>;

void insert(RankSet &set, int32_t number) {
  set.resize(std::max<size_t>(set.size(), number / 64 + 1));
  set[number / 64] |= uint64_t{1} << number % 64;
}
bool contains(const RankSet &set, int32_t number) {
  return static_cast<size_t>(number / 64) < set.size() && (set[number / 64] >> number % 64 & 1) != 0;
}
bool within(const RankSet &part, const RankSet &all) {
  for (size_t i = 0; i < part.size(); ++i)
    if ((part[i] & ~(i < all.size() ? all[i] : 0)) != 0)
      return false;
  return true;
}

/// What the ranks of one node lack: bytes by the ranks of the node that hold them and the ranks that want them.
using NodeNeeds = std::map<std::pair<RankSet, RankSet>, int64_t>;

/// The sums over cells of which the lower bounds are made.
class BoundSums {
public:
  explicit BoundSums(const Layout &layout)
      : layout_(layout), topology_(layout.topology), copies_(layout), network_(layout), local_(layout.world),
        intoRank_(layout.world), intoNode_(network_.nodes()), intoReplicaNode_(network_.nodes()),
        needs_(network_.nodes()), hasSource_(network_.nodes()), largest_(topology_) {
    for (int32_t rank : layout.endpoints[0].ranks)
      if (!layout.endpoints[0].storage)
        hasSource_[network_.node(rank)] = true;
  }

  void add(const WantedCell &cell) {
    sent_ = cell.elements * itemBytes(layout_.tensorPatterns[cell.pattern].dtype);
    findWanters(cell);
    findHolderNodes(cell);
    Want outside; // what ranks that lack it want
    bool holdersConvert = false;
    int64_t received = 0, converters = 0;
    for (const Wanter &wanter : wanters_)
      converters += wanter.want.converts();
    for (const Wanter &wanter : wanters_)
      if (wanter.holds) {
        local_[wanter.rank] += sent_ * wanter.positions;
        holdersConvert = holdersConvert || wanter.want.converts();
      } else {
        const bool others = layout_.pool() || converters > (wanter.want.converts() ? 1 : 0);
        intoRank_[wanter.rank] += wanter.want.least(sent_, others);
        received += wanter.positions;
        outside.add(wanter.want);
      }
    if (received > 0) {
      fromRanks_[{cell.holders, nodesThatWant()}] += outside.least(sent_, holdersConvert);
      anywhere_[cell.holders] += received * sent_ * copies_.each();
    }
    if (network_.severalNodes())
      addNodes(cell, converters);
  }

  LowerBounds bounds() {
    LowerBounds result;
    addRankCuts();
    for (int32_t node = 0; node < network_.nodes(); ++node) {
      const auto nics = static_cast<int64_t>(network_.nicsOf(node).size());
      if (network_.severalNodes())
        largest_.add({CutKind::node_ingress, intoNode_[node], 0, nics, 0});
      if (layout_.pool())
        largest_.add({CutKind::replica_node_ingress, intoReplicaNode_[node], 0, replicaNics(node), 0});
      addNodeRests(node);
    }
    addEgress();
    result.cuts = largest_.take();
    result.rankIngress = *std::max_element(intoRank_.begin(), intoRank_.end());
    result.betweenNodes = betweenNodes_;
    result.egressWithoutRelays = load(anywhere_, layout_.world);
    return result;
  }

private:
  /// The ranks that want a cell, ascending.
  void findWanters(const WantedCell &cell) {
    wanters_.clear();
    for (const Overlap *overlap : cell.wants) {
      const Endpoint &target = layout_.endpoints[overlap->endpoint];
      const WantedForm form = formOf(target.params[overlap->param]);
      Want want{!form.converts, !form.converts || form.senderConverts, 0};
      if (form.converts)
        want.converted = std::max<int64_t>(1, cell.elements * form.bytes / form.elements);
      for (int32_t meshRank : overlap->targets)
        wanters_.push_back({target.ranks[meshRank], false, 1, want});
    }
    auto before = [](const Wanter &a, const Wanter &b) { return a.rank < b.rank; };
    if (!std::is_sorted(wanters_.begin(), wanters_.end(), before))
      std::sort(wanters_.begin(), wanters_.end(), before);
    size_t count = 0;
    for (const Wanter &each : wanters_)
      if (count > 0 && wanters_[count - 1].rank == each.rank) {
        wanters_[count - 1].want.add(each.want);
        ++wanters_[count - 1].positions;
      } else {
        wanters_[count++] = each;
      }
    wanters_.resize(count);
    for (Wanter &each : wanters_)
      each.holds = std::binary_search(cell.holders.begin(), cell.holders.end(), each.rank);
  }

  void findHolderNodes(const WantedCell &cell) {
    holderNodes_.clear();
    for (int32_t rank : cell.holders)
      if (const int32_t node = network_.node(rank); holderNodes_.empty() || holderNodes_.back() != node)
        holderNodes_.push_back(node);
  }

  /// The nodes of holders on which other ranks lack the cell.
  std::vector<int32_t> nodesThatWant() const {
    std::vector<int32_t> result;
    for (const Wanter &wanter : wanters_)
      if (const int32_t node = network_.node(wanter.rank);
          !wanter.holds && (result.empty() || result.back() != node) &&
          std::binary_search(holderNodes_.begin(), holderNodes_.end(), node))
        result.push_back(node);
    return result;
  }

  /// The links and NICs of which one must carry each byte of some holders: links by rank, then NICs from `world` on.
  /// Bytes leave a node for which wants(node) does not hold over its NICs, if these are less than what the holders
  /// have.
  template <class Wants> std::vector<int32_t> exits(const std::vector<int32_t> &holders, Wants wants) const {
    const auto world = static_cast<int32_t>(layout_.world);
    std::vector<int32_t> links, nics, nicsOfHolders;
    for (auto begin = holders.begin(), end = begin; begin != holders.end(); begin = end) {
      const int32_t node = network_.node(*begin);
      nicsOfHolders.clear();
      for (; end != holders.end() && network_.node(*end) == node; ++end)
        if (const auto nic = static_cast<int32_t>(topology_.nic(*end));
            nicsOfHolders.empty() || nicsOfHolders.back() != nic)
          nicsOfHolders.push_back(nic);
      const int64_t count = end - begin, others = network_.endRank(node) - network_.firstRank(node) - count;
      const int64_t lackingElsewhere = layout_.world - static_cast<int64_t>(holders.size()) - others;
      const bool usesLinks = others > 0, usesNics = network_.severalNodes() && (lackingElsewhere > 0 || layout_.pool());
      const std::vector<int32_t> &nicsOfNode = network_.nicsOf(node);
      const int64_t rate =
          (usesLinks ? count * topology_.linkRate : 0) + static_cast<int64_t>(nicsOfHolders.size()) * topology_.nicRate;
      const bool byNode =
          usesNics && !wants(node) && static_cast<int64_t>(nicsOfNode.size()) * topology_.nicRate < rate;
      if (usesLinks && !byNode)
        links.insert(links.end(), begin, end);
      if (usesNics)
        for (int32_t nic : byNode ? nicsOfNode : nicsOfHolders)
          nics.push_back(world + nic);
    }
    links.insert(links.end(), nics.begin(), nics.end());
    return links;
  }

  /// Adds what nodes lack. `converters`: how many ranks want the cell in a converted form.
  void addNodes(const WantedCell &cell, int64_t converters) {
    Want outside; // what nodes that lack it want
    bool any = false, holdersConvert = false;
    for (auto begin = wanters_.begin(), end = begin; begin != wanters_.end(); begin = end) {
      const int32_t node = network_.node(begin->rank);
      Want inside;
      int64_t here = 0; // converters
      for (; end != wanters_.end() && network_.node(end->rank) == node; ++end) {
        inside.add(end->want);
        here += end->want.converts();
      }
      const bool lacks = !std::binary_search(holderNodes_.begin(), holderNodes_.end(), node);
      if (lacks) {
        const int64_t bytes = inside.least(sent_, layout_.pool() || converters > here);
        intoNode_[node] += bytes;
        betweenNodes_ += bytes;
        outside.add(inside);
        any = true;
      } else {
        holdersConvert = holdersConvert || here > 0;
      }
      if (layout_.pool())
        intoReplicaNode_[node] += inside.least(sent_, true);
      if (hasSource_[node])
        addNeeds(cell, node, llvm::ArrayRef(&*begin, end - begin));
    }
    if (any)
      fromNodes_[holderNodes_] += outside.least(sent_, holdersConvert);
  }

  /// Adds what ranks of a node lack.
  void addNeeds(const WantedCell &cell, int32_t node, llvm::ArrayRef<Wanter> wanters) {
    RankSet holding, wanting;
    int64_t bytes = sent_;
    const int32_t first = network_.firstRank(node), end = network_.endRank(node);
    for (const Wanter &wanter : wanters)
      if (!wanter.holds) {
        insert(wanting, wanter.rank - first);
        bytes = std::min(bytes, wanter.want.least(sent_, true));
      }
    if (wanting.empty())
      return;
    for (auto rank = std::lower_bound(cell.holders.begin(), cell.holders.end(), first);
         rank != cell.holders.end() && *rank < end; ++rank)
      insert(holding, *rank - first);
    needs_[node][{std::move(holding), std::move(wanting)}] += bytes;
  }

  /// Adds the cuts into one rank, and into several that share a NIC.
  void addRankCuts() {
    const int64_t nics = network_.severalNodes() ? 1 : 0;
    for (int64_t first = 0, end = 0; first < layout_.world; first = end) {
      std::vector<int64_t> into; // by the ranks of a NIC
      for (; end < layout_.world && topology_.nic(end) == topology_.nic(first); ++end) {
        into.push_back(intoRank_[end]);
        largest_.add({CutKind::local_copies, local_[end], 0, 0, 1});
      }
      std::sort(into.rbegin(), into.rend());
      int64_t bytes = 0;
      for (size_t count = 1; count <= (nics > 0 ? into.size() : 1) && into[count - 1] > 0; ++count) {
        bytes += into[count - 1];
        largest_.add({count == 1 ? CutKind::rank_ingress : CutKind::shared_nic_ingress, bytes,
                      network_.hasLink(first) ? static_cast<int64_t>(count) : 0, nics, 0});
      }
    }
  }

  /// The NICs of a node of an engine replica that has no other ranks.
  int64_t replicaNics(int32_t node) const {
    const int32_t first = std::max(network_.firstRank(node), layout_.endpoints.back().ranks.front());
    const int32_t last = network_.endRank(node) - 1; // the ranks of replica 0 are the last of the world
    return first > last ? 0 : topology_.nic(last) - topology_.nic(first) + 1;
  }

  /// Adds the cuts around the ranks of a node without some holders: each set of ranks that hold a byte, and all of
  /// them.
  void addNodeRests(int32_t node) {
    std::vector<RankSet> sets;
    RankSet all;
    for (const auto &[ranks, bytes] : needs_[node]) {
      const RankSet &holding = ranks.first;
      if (holding.empty() || (!sets.empty() && sets.back() == holding)) // the needs are ordered by holders
        continue;
      sets.push_back(holding);
      all.resize(std::max(all.size(), holding.size()));
      for (size_t i = 0; i < holding.size(); ++i)
        all[i] |= holding[i];
    }
    if (sets.size() > 1)
      sets.push_back(std::move(all));
    for (const RankSet &holding : sets) {
      Cut cut{CutKind::node_rest_ingress, 0, 0, 0, 0};
      std::vector<int64_t> nics;
      const int32_t first = network_.firstRank(node);
      for (int32_t rank = first; rank < network_.endRank(node); ++rank)
        if (contains(holding, rank - first))
          ++cut.links;
        else
          nics.push_back(topology_.nic(rank));
      sortUnique(nics);
      cut.nics = static_cast<int64_t>(nics.size());
      for (const auto &[ranks, bytes] : needs_[node])
        if (within(ranks.first, holding) && !within(ranks.second, holding))
          cut.bytes += bytes;
      if (cut.nics > 0)
        largest_.add(cut);
    }
  }

  /// Adds the cuts around ranks and nodes that hold bytes which others lack.
  void addEgress() {
    const int32_t world = static_cast<int32_t>(layout_.world);
    // Capacities of a link and a NIC, as small integers in about the proportion of their rates.
    const int64_t unit = std::max(std::gcd(topology_.linkRate, topology_.nicRate),
                                  std::max(topology_.linkRate, topology_.nicRate) >> 20);
    std::vector<int64_t> capacity(world, std::max<int64_t>(1, topology_.linkRate / unit) * copies_.sources());
    capacity.resize(world + topology_.nic(world - 1) + 1, std::max<int64_t>(1, topology_.nicRate / unit));
    // A node counts as one that wants the bytes of a class, or of all classes: neither is always the better choice.
    std::vector<bool> wants(network_.nodes());
    for (int32_t rank = 0; rank < world; ++rank)
      wants[network_.node(rank)] = wants[network_.node(rank)] || intoRank_[rank] > 0;
    std::map<std::vector<int32_t>, int64_t> classes[2];
    for (const auto &[from, bytes] : fromRanks_) {
      const auto &[holders, nodes] = from;
      classes[0][exits(holders, [&](int32_t node) { return std::binary_search(nodes.begin(), nodes.end(), node); })] +=
          bytes;
      classes[1][exits(holders, [&](int32_t node) { return wants[node]; })] += bytes;
    }
    for (int choice = 0; choice < (classes[0] == classes[1] ? 1 : 2); ++choice) {
      const Egress found = egress(classes[choice], capacity);
      Cut cut{CutKind::rank_egress, found.bytes, 0, 0, 0};
      for (int32_t sender : found.senders)
        ++(sender < world ? cut.links : cut.nics);
      cut.links *= copies_.sources(); // a byte leaves one replica of all copies
      largest_.add(cut);
    }

    capacity.clear();
    for (int32_t node = 0; node < network_.nodes(); ++node)
      capacity.push_back(static_cast<int64_t>(network_.nicsOf(node).size()));
    const Egress nodes = egress(fromNodes_, capacity);
    Cut cut{CutKind::node_egress, nodes.bytes, 0, 0, 0};
    for (int32_t node : nodes.senders)
      cut.nics += capacity[node];
    largest_.add(cut);
  }

  /// The senders that take longest to send what only they can, and these bytes.
  struct Egress {
    std::vector<int32_t> senders;
    int64_t bytes = 0;
  };
  static Egress egress(const std::map<std::vector<int32_t>, int64_t> &bytes, const std::vector<int64_t> &capacity) {
    constexpr int64_t kLarge = int64_t{1} << 53;
    int64_t all = 1;
    for (const auto &[senders, sum] : bytes)
      all += sum;
    const int64_t scale = std::max<int64_t>(1, kLarge / all); // so that rounding the load up changes little
    std::vector<SendClass> classes;
    classes.reserve(bytes.size());
    for (const auto &[senders, sum] : bytes)
      classes.push_back({senders, sum * scale});
    const Optimum found = optimum(classes, std::vector<int64_t>(capacity.size()), capacity);
    return {found.busiest, found.busiestBytes / scale};
  }

  const Layout &layout_;
  const Topology &topology_;
  const Copies copies_;
  const Network network_;
  /// By holders and those of their nodes that want the bytes.
  std::map<std::pair<std::vector<int32_t>, std::vector<int32_t>>, int64_t> fromRanks_;
  std::map<std::vector<int32_t>, int64_t> fromNodes_; // by the nodes of holders
  std::map<std::vector<int32_t>, int64_t> anywhere_;  // by holders
  std::vector<int64_t> local_, intoRank_;             // by rank
  std::vector<int64_t> intoNode_, intoReplicaNode_;   // by node
  std::vector<NodeNeeds> needs_;                      // by node; only of nodes with source ranks
  std::vector<bool> hasSource_;                       // by node
  int64_t betweenNodes_ = 0;
  LargestCuts largest_;
  // The present cell: the bytes that are sent, the ranks that want it, the nodes of its holders.
  int64_t sent_ = 0;
  std::vector<Wanter> wanters_;
  std::vector<int32_t> holderNodes_;
};

} // namespace

double Cut::seconds(const Topology &topology) const {
  const auto rate = static_cast<double>(links) * static_cast<double>(topology.linkRate) +
                    static_cast<double>(nics) * static_cast<double>(topology.nicRate) +
                    static_cast<double>(copies) * static_cast<double>(topology.copyRate);
  return bytes > 0 ? static_cast<double>(bytes) / rate : 0;
}

LowerBounds lowerBounds(const Layout &layout, const Transfers &transfers) {
  BoundSums sums(layout);
  forEachWantedCell(layout, transfers, [&](const WantedCell &cell) { sums.add(cell); });
  return sums.bounds();
}

int64_t storageBound(const Layout &layout, const Transfers &transfers) {
  const Endpoint &source = layout.endpoints[0];
  Candidates candidates(layout);
  std::map<std::vector<int32_t>, int64_t> files; // by the ranks that may read or write them
  for (const Overlap &overlap : transfers.overlaps) {
    const Endpoint &target = layout.endpoints[overlap.endpoint];
    if (overlap.pattern < 0 || source.storage == target.storage)
      continue;
    candidates.select(overlap);
    std::vector<int32_t> ranks;
    for (int32_t meshRank : source.storage ? llvm::ArrayRef(overlap.targets) : llvm::ArrayRef(candidates.all()))
      ranks.push_back(source.storage ? target.ranks[meshRank] : source.ranks[meshRank]);
    std::sort(ranks.begin(), ranks.end());
    // Reading: one read serves all ranks that need the bytes. Writing: each target file gets its own copy.
    files[std::move(ranks)] +=
        overlap.bytes * overlap.tensors * (source.storage ? 1 : static_cast<int64_t>(overlap.targets.size()));
  }
  return load(files, layout.world);
}

} // namespace reshard
