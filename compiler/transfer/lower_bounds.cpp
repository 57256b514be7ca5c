// SPDX-License-Identifier: Apache-2.0
// Adds up, over all overlaps, the bytes that must leave one of several ranks or NICs, and the bytes that must arrive at
// each rank and node. The egress bound is the fractional optimum over these sets.
#include "compiler/transfer/lower_bounds.h"

#include "compiler/transfer/candidates.h"
#include "compiler/transfer/optimum.h"
#include "ir/copies.h"

#include "llvm/ADT/MapVector.h"

#include <algorithm>
#include <map>
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
    if (candidates.remote(transfer.target))
      ofOverlap[&candidates.preferred(transfer.target)] += ir::bytes(transfers, transfer) * each;
  }
  finish();
  return load(bytes, layout.endpoints[0].meshRanks());
}

namespace {

int64_t largest(const std::vector<int64_t> &values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

/// Collects bytes that must leave one of several ranks or NICs, and bytes that must arrive at any of them.
class Egress {
public:
  void add(std::vector<int32_t> replicas, int64_t bytes) { classes_[std::move(replicas)] += bytes; }
  void arrive(int64_t bytes) { arriving_ += bytes; }
  int64_t egress(int64_t count) const { return load(classes_, count); }
  int64_t mean(int64_t over) const { return over > 0 ? (arriving_ + over - 1) / over : 0; }

private:
  std::map<std::vector<int32_t>, int64_t> classes_;
  int64_t arriving_ = 0;
};

template <class T> void sortUnique(std::vector<T> &list) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

/// The ranks, nodes and NICs of a job.
struct Network {
  std::vector<std::vector<int32_t>> nicsOf; // by node: the NICs of all ranks of the world
  int64_t ranks = 0, nodes = 0, nics = 0;   // how many have source or target ranks

  explicit Network(const Layout &layout) : nicsOf(layout.topology.node(layout.world - 1) + 1) {
    for (int64_t rank = 0; rank < layout.world; ++rank) {
      std::vector<int32_t> &ofNode = nicsOf[layout.topology.node(rank)];
      if (const auto nic = static_cast<int32_t>(layout.topology.nic(rank)); ofNode.empty() || ofNode.back() != nic)
        ofNode.push_back(nic);
    }
    std::vector<int64_t> allRanks, allNodes;
    for (const Endpoint &endpoint : layout.endpoints)
      for (size_t meshRank = 0; meshRank < endpoint.ranks.size() && !endpoint.storage; ++meshRank) {
        allRanks.push_back(endpoint.ranks[meshRank]);
        allNodes.push_back(layout.topology.node(endpoint.ranks[meshRank]));
      }
    sortUnique(allRanks);
    sortUnique(allNodes);
    ranks = static_cast<int64_t>(allRanks.size());
    nodes = static_cast<int64_t>(allNodes.size());
    for (int64_t node : allNodes)
      nics += static_cast<int64_t>(nicsOf[node].size());
  }
};

/// The sums over overlaps of which the lower bounds are made.
class BoundSums {
public:
  explicit BoundSums(const Layout &layout)
      : layout_(layout), source_(layout.endpoints[0]), copies_(layout), network_(layout), candidates_(layout),
        local_(layout.world), intoRank_(layout.world), intoNode_(network_.nicsOf.size()) {}

  void add(const Overlap &overlap) {
    candidates_.select(overlap);
    findReplicas();
    const int64_t bytes = overlap.bytes * overlap.tensors;
    if (const int64_t remote = addTargets(overlap, bytes); remote > 0) {
      fromRanks_.add(replicaRanks_, bytes);
      anywhere_.add(candidates_.all(), remote * bytes * copies_.each());
    }
    addNodes(bytes);
  }

  LowerBounds bounds() {
    LowerBounds result;
    result.nodes = network_.nodes;
    result.rankLocal = largest(local_);
    result.rankIngress = largest(intoRank_);
    // A byte leaves one replica of all copies.
    result.rankEgress = (fromRanks_.egress(layout_.world) + copies_.sources() - 1) / copies_.sources();
    result.rankMean = fromRanks_.mean(network_.ranks);
    std::vector<int64_t> intoNic;
    for (size_t node = 0; node < intoNode_.size(); ++node) {
      const auto nics = static_cast<int64_t>(network_.nicsOf[node].size());
      intoNic.push_back((intoNode_[node] + nics - 1) / nics);
    }
    result.nicIngress = largest(intoNic);
    result.nicEgress = fromNics_.egress(layout_.world);
    result.nicMean = fromNics_.mean(network_.nics);
    result.betweenNodes = betweenNodes_;
    result.egressWithoutRelays = anywhere_.egress(source_.meshRanks());
    return result;
  }

private:
  /// The ranks and nodes of the overlap's replicas.
  void findReplicas() {
    replicaRanks_.clear();
    replicaNodes_.clear();
    for (int32_t meshRank : candidates_.all()) {
      replicaRanks_.push_back(source_.ranks[meshRank]);
      replicaNodes_.push_back(static_cast<int32_t>(layout_.topology.node(source_.ranks[meshRank])));
    }
    sortUnique(replicaRanks_);
    sortUnique(replicaNodes_);
  }

  /// Adds the bytes that each target rank copies or receives, and finds the nodes that need them. Returns the number of
  /// ranks that receive them.
  int64_t addTargets(const Overlap &overlap, int64_t bytes) {
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    needing_.clear();
    int64_t remote = 0;
    for (int32_t meshRank : overlap.targets) {
      if (!candidates_.remote(meshRank)) {
        local_[target.ranks[meshRank]] += bytes;
        continue;
      }
      ++remote;
      intoRank_[target.ranks[meshRank]] += bytes;
      fromRanks_.arrive(bytes * copies_.targets());
      const auto node = static_cast<int32_t>(candidates_.nodeOf(meshRank));
      if (!std::binary_search(replicaNodes_.begin(), replicaNodes_.end(), node))
        needing_.push_back(node);
    }
    sortUnique(needing_);
    return remote;
  }

  /// Adds the bytes that nodes without a replica receive.
  void addNodes(int64_t bytes) {
    for (int32_t node : needing_) {
      intoNode_[node] += bytes;
      betweenNodes_ += bytes;
      fromNics_.arrive(bytes);
    }
    if (needing_.empty())
      return;
    std::vector<int32_t> replicaNics;
    for (int32_t node : replicaNodes_)
      replicaNics.insert(replicaNics.end(), network_.nicsOf[node].begin(), network_.nicsOf[node].end());
    fromNics_.add(std::move(replicaNics), bytes);
  }

  const Layout &layout_;
  const Endpoint &source_;
  const Copies copies_;
  const Network network_;
  Candidates candidates_;
  Egress fromRanks_, fromNics_, anywhere_;
  std::vector<int64_t> local_, intoRank_; // by rank
  std::vector<int64_t> intoNode_;
  int64_t betweenNodes_ = 0;
  std::vector<int32_t> replicaRanks_, replicaNodes_, needing_; // the present overlap's; `needing_`: nodes
};

} // namespace

LowerBounds lowerBounds(const Layout &layout, const Transfers &transfers) {
  BoundSums sums(layout);
  for (const Overlap &overlap : transfers.overlaps)
    if (overlap.pattern >= 0 && !layout.endpoints[0].storage && !layout.endpoints[overlap.endpoint].storage)
      sums.add(overlap);
  return sums.bounds();
}

int64_t storageBound(const Layout &layout, const Transfers &transfers) {
  const Endpoint &source = layout.endpoints[0];
  Candidates candidates(layout);
  Egress files;
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
    files.add(std::move(ranks),
              overlap.bytes * overlap.tensors * (source.storage ? 1 : static_cast<int64_t>(overlap.targets.size())));
  }
  return files.egress(layout.world);
}

} // namespace reshard
