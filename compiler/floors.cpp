#include "compiler/floors.h"

#include "compiler/candidates.h"
#include "compiler/optimum.h"

#include <algorithm>
#include <map>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// The optimum over `count` places, ranks or NICs of bytes by candidates.
int64_t load(const std::map<std::vector<int32_t>, int64_t> &bytes, int64_t count) {
  std::vector<SendClass> classes;
  for (const auto &[places, sum] : bytes)
    classes.push_back({places, sum});
  return optimum(classes, std::vector<int64_t>(count)).load;
}

} // namespace

int64_t egressFloor(const Layout &layout, const Transfers &transfers) {
  Candidates candidates(layout);
  std::map<std::vector<int32_t>, int64_t> bytes; // by candidates
  std::map<const std::vector<int32_t> *, int64_t> ofTile;
  const Tile *tile = nullptr;
  auto finish = [&] {
    for (const auto &[places, sum] : ofTile)
      bytes[*places] += sum;
    ofTile.clear();
  };
  for (const Transfer &transfer : transfers.transfers) {
    if (tile != &transfers.tiles[transfer.tile]) {
      finish();
      tile = &transfers.tiles[transfer.tile];
      candidates.select(*tile);
    }
    if (candidates.remote(transfer.target))
      ofTile[&candidates.near(transfer.target)] += ir::bytes(transfers, transfer);
  }
  finish();
  return load(bytes, layout.endpoints[0].places());
}

namespace {

int64_t largest(const std::vector<int64_t> &values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

/// The optimum of bytes that must leave one of some ranks, or NICs, and the sum of what must arrive over all of them.
class Leaving {
public:
  void add(std::vector<int32_t> holders, int64_t bytes) { classes_[std::move(holders)] += bytes; }
  void arrive(int64_t bytes) { arriving_ += bytes; }
  int64_t egress(int64_t count) const { return load(classes_, count); }
  int64_t share(int64_t over) const { return over > 0 ? (arriving_ + over - 1) / over : 0; }

private:
  std::map<std::vector<int32_t>, int64_t> classes_;
  int64_t arriving_ = 0;
};

} // namespace

Floors floors(const Layout &layout, const Transfers &transfers) {
  Floors result;
  const Endpoint &source = layout.endpoints[0];
  std::vector<int64_t> ranks, nodes, nics; // each once
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
    for (size_t place = 0; place < endpoint.ranks.size() && !endpoint.storage; ++place) {
      ranks.push_back(endpoint.ranks[place]);
      nodes.push_back(layout.topology.node(endpoint.ranks[place]));
    }
  once(ranks);
  once(nodes);
  for (int64_t node : nodes)
    nics.insert(nics.end(), nicsOf[node].begin(), nicsOf[node].end());
  result.nodes = static_cast<int64_t>(nodes.size());
  Candidates candidates(layout);
  Leaving rankLeaving, nicLeaving, anywhere;
  std::vector<int64_t> local(layout.world), intoRank(layout.world), intoNode(nicsOf.size());
  std::vector<int32_t> holderRanks, holderNodes, needing;
  for (const Tile &tile : transfers.tiles) {
    const Endpoint &target = layout.endpoints[tile.endpoint];
    if (tile.family < 0 || source.storage || target.storage)
      continue;
    candidates.select(tile);
    const int64_t bytes = tile.bytes * tile.tensors;
    holderRanks.clear();
    holderNodes.clear();
    needing.clear();
    for (int32_t place : candidates.all()) {
      holderRanks.push_back(source.ranks[place]);
      holderNodes.push_back(static_cast<int32_t>(layout.topology.node(source.ranks[place])));
    }
    for (auto *list : {&holderRanks, &holderNodes}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    int64_t remote = 0;
    for (int32_t place : tile.targets) {
      if (!candidates.remote(place)) {
        local[target.ranks[place]] += bytes;
        continue;
      }
      ++remote;
      intoRank[target.ranks[place]] += bytes;
      rankLeaving.arrive(bytes);
      const int64_t node = candidates.nodeOf(place);
      if (!std::binary_search(holderNodes.begin(), holderNodes.end(), static_cast<int32_t>(node)))
        needing.push_back(static_cast<int32_t>(node));
    }
    std::sort(needing.begin(), needing.end());
    needing.erase(std::unique(needing.begin(), needing.end()), needing.end());
    for (int32_t node : needing) {
      intoNode[node] += bytes;
      result.betweenNodes += bytes;
      nicLeaving.arrive(bytes);
    }
    if (remote > 0) {
      rankLeaving.add(holderRanks, bytes);
      anywhere.add(candidates.all(), remote * bytes);
    }
    if (needing.empty())
      continue;
    std::vector<int32_t> holderNics;
    for (int32_t node : holderNodes)
      holderNics.insert(holderNics.end(), nicsOf[node].begin(), nicsOf[node].end());
    nicLeaving.add(std::move(holderNics), bytes);
  }
  result.rankLocal = largest(local);
  result.rankIngress = largest(intoRank);
  result.rankEgress = rankLeaving.egress(layout.world);
  result.rankShare = rankLeaving.share(static_cast<int64_t>(ranks.size()));
  for (size_t node = 0; node < nicsOf.size(); ++node)
    intoNode[node] =
        (intoNode[node] + static_cast<int64_t>(nicsOf[node].size()) - 1) / static_cast<int64_t>(nicsOf[node].size());
  result.nicIngress = largest(intoNode);
  result.nicEgress = nicLeaving.egress(layout.world);
  result.nicShare = nicLeaving.share(static_cast<int64_t>(nics.size()));
  result.egressAnywhere = anywhere.egress(source.places());
  return result;
}

int64_t storageFloor(const Layout &layout, const Transfers &transfers) {
  const Endpoint &source = layout.endpoints[0];
  Candidates candidates(layout);
  Leaving files;
  for (const Tile &tile : transfers.tiles) {
    const Endpoint &target = layout.endpoints[tile.endpoint];
    if (tile.family < 0 || source.storage == target.storage)
      continue;
    candidates.select(tile);
    std::vector<int32_t> ranks;
    for (int32_t place : source.storage ? tile.targets : candidates.all())
      ranks.push_back(source.storage ? target.ranks[place] : source.ranks[place]);
    std::sort(ranks.begin(), ranks.end());
    // A file's param is wanted once; a rank's, once by all of them together.
    files.add(std::move(ranks),
              tile.bytes * tile.tensors * (source.storage ? 1 : static_cast<int64_t>(tile.targets.size())));
  }
  return files.egress(layout.world);
}

} // namespace reshard
