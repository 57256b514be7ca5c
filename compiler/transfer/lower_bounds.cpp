#include "compiler/transfer/lower_bounds.h"

#include "compiler/transfer/candidates.h"
#include "compiler/transfer/optimum.h"

#include <algorithm>
#include <map>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// The fractional optimum of the busiest of `count` senders (mesh ranks, ranks or NICs). `bytes`: by list of
/// candidates.
int64_t load(const std::map<std::vector<int32_t>, int64_t> &bytes, int64_t count) {
  std::vector<SendClass> classes;
  for (const auto &[meshRanks, sum] : bytes)
    classes.push_back({meshRanks, sum});
  return optimum(classes, std::vector<int64_t>(count)).load;
}

} // namespace

int64_t egressBound(const Layout &layout, const Transfers &transfers) {
  Candidates candidates(layout);
  std::map<std::vector<int32_t>, int64_t> bytes; // by candidates
  std::map<const std::vector<int32_t> *, int64_t> ofOverlap;
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
      ofOverlap[&candidates.preferred(transfer.target)] += ir::bytes(transfers, transfer);
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

} // namespace

LowerBounds lowerBounds(const Layout &layout, const Transfers &transfers) {
  LowerBounds result;
  const Endpoint &source = layout.endpoints[0];
  std::vector<int64_t> ranks, nodes, nics; // of all source and target ranks, without repetitions
  auto once = [](std::vector<int64_t> &list) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  };
  std::vector<std::vector<int32_t>> nicsOf(layout.topology.node(layout.world - 1) + 1); // of all ranks of the world
  for (int64_t rank = 0; rank < layout.world; ++rank)
    if (const auto nic = static_cast<int32_t>(layout.topology.nic(rank));
        nicsOf[layout.topology.node(rank)].empty() || nicsOf[layout.topology.node(rank)].back() != nic)
      nicsOf[layout.topology.node(rank)].push_back(nic);
  for (const Endpoint &endpoint : layout.endpoints)
    for (size_t meshRank = 0; meshRank < endpoint.ranks.size() && !endpoint.storage; ++meshRank) {
      ranks.push_back(endpoint.ranks[meshRank]);
      nodes.push_back(layout.topology.node(endpoint.ranks[meshRank]));
    }
  once(ranks);
  once(nodes);
  for (int64_t node : nodes)
    nics.insert(nics.end(), nicsOf[node].begin(), nicsOf[node].end());
  result.nodes = static_cast<int64_t>(nodes.size());
  Candidates candidates(layout);
  Egress fromRanks, fromNics, anywhere;
  std::vector<int64_t> local(layout.world), intoRank(layout.world), intoNode(nicsOf.size());
  std::vector<int32_t> replicaRanks, replicaNodes, needing;
  for (const Overlap &overlap : transfers.overlaps) {
    const Endpoint &target = layout.endpoints[overlap.endpoint];
    if (overlap.pattern < 0 || source.storage || target.storage)
      continue;
    candidates.select(overlap);
    const int64_t bytes = overlap.bytes * overlap.tensors;
    replicaRanks.clear();
    replicaNodes.clear();
    needing.clear();
    for (int32_t meshRank : candidates.all()) {
      replicaRanks.push_back(source.ranks[meshRank]);
      replicaNodes.push_back(static_cast<int32_t>(layout.topology.node(source.ranks[meshRank])));
    }
    for (auto *list : {&replicaRanks, &replicaNodes}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    int64_t remote = 0;
    for (int32_t meshRank : overlap.targets) {
      if (!candidates.remote(meshRank)) {
        local[target.ranks[meshRank]] += bytes;
        continue;
      }
      ++remote;
      intoRank[target.ranks[meshRank]] += bytes;
      fromRanks.arrive(bytes);
      const int64_t node = candidates.nodeOf(meshRank);
      if (!std::binary_search(replicaNodes.begin(), replicaNodes.end(), static_cast<int32_t>(node)))
        needing.push_back(static_cast<int32_t>(node));
    }
    std::sort(needing.begin(), needing.end());
    needing.erase(std::unique(needing.begin(), needing.end()), needing.end());
    for (int32_t node : needing) {
      intoNode[node] += bytes;
      result.betweenNodes += bytes;
      fromNics.arrive(bytes);
    }
    if (remote > 0) {
      fromRanks.add(replicaRanks, bytes);
      anywhere.add(candidates.all(), remote * bytes);
    }
    if (needing.empty())
      continue;
    std::vector<int32_t> replicaNics;
    for (int32_t node : replicaNodes)
      replicaNics.insert(replicaNics.end(), nicsOf[node].begin(), nicsOf[node].end());
    fromNics.add(std::move(replicaNics), bytes);
  }
  result.rankLocal = largest(local);
  result.rankIngress = largest(intoRank);
  result.rankEgress = fromRanks.egress(layout.world);
  result.rankMean = fromRanks.mean(static_cast<int64_t>(ranks.size()));
  for (size_t node = 0; node < nicsOf.size(); ++node)
    intoNode[node] =
        (intoNode[node] + static_cast<int64_t>(nicsOf[node].size()) - 1) / static_cast<int64_t>(nicsOf[node].size());
  result.nicIngress = largest(intoNode);
  result.nicEgress = fromNics.egress(layout.world);
  result.nicMean = fromNics.mean(static_cast<int64_t>(nics.size()));
  result.egressWithoutRelays = anywhere.egress(source.meshRanks());
  return result;
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
    for (int32_t meshRank : source.storage ? overlap.targets : candidates.all())
      ranks.push_back(source.storage ? target.ranks[meshRank] : source.ranks[meshRank]);
    std::sort(ranks.begin(), ranks.end());
    // Reading: one read serves all ranks that need the bytes. Writing: each target file gets its own copy.
    files.add(std::move(ranks),
              overlap.bytes * overlap.tensors * (source.storage ? 1 : static_cast<int64_t>(overlap.targets.size())));
  }
  return files.egress(layout.world);
}

} // namespace reshard
