#include "compiler/shard_distribution.h"

#include "compiler/candidates.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

int64_t groupOf(const Layout &layout, const Endpoint &endpoint, int64_t place) {
  if (layout.files.group.empty())
    return 0;
  for (const Axis &axis : endpoint.axes)
    if (std::find(layout.files.group.begin(), layout.files.group.end(), axis.name) != layout.files.group.end())
      place -= place / axis.stride % axis.size * axis.stride;
  return place;
}

void elect(const Layout &layout, const Transfers &transfers, std::vector<Shard> &shards) {
  std::stable_sort(shards.begin(), shards.end(), [&](const Shard &a, const Shard &b) {
    const std::string &x = layout.families[transfers.tiles[a.tile].family].name,
                      &y = layout.families[transfers.tiles[b.tile].family].name;
    return std::make_tuple(a.group, a.cross, a.holders.size(), -a.bytes, std::cref(x), a.tensor, a.tile) <
           std::make_tuple(b.group, b.cross, b.holders.size(), -b.bytes, std::cref(y), b.tensor, b.tile);
  });
  std::vector<int64_t> load(layout.world);
  for (Shard &shard : shards) {
    shard.rank = *std::min_element(shard.holders.begin(), shard.holders.end(),
                                   [&](int32_t a, int32_t b) { return std::tie(load[a], a) < std::tie(load[b], b); });
    load[shard.rank] += shard.bytes;
  }
}

std::vector<Shard> megatronDistribution(const Layout &layout, const Transfers &transfers) {
  const Endpoint &source = layout.endpoints[0];
  Candidates candidates(layout);
  std::vector<Shard> shards;
  for (uint32_t t = 0; t < transfers.tiles.size(); ++t) {
    const Tile &tile = transfers.tiles[t];
    const Endpoint &target = layout.endpoints[tile.endpoint];
    if (tile.family < 0 || source.storage == target.storage)
      continue;
    candidates.select(tile);
    const Endpoint &ranks = source.storage ? target : source;
    std::map<int64_t, std::vector<int32_t>> groups;
    int32_t main = INT32_MAX;
    int64_t mainGroup = 0;
    for (int32_t place : source.storage ? tile.targets : candidates.all()) {
      const int64_t group = groupOf(layout, ranks, place);
      groups[group].push_back(ranks.ranks[place]);
      if (ranks.ranks[place] < main) {
        main = ranks.ranks[place];
        mainGroup = group;
      }
    }
    for (auto &[group, holders] : groups) {
      if (!source.storage && group != mainGroup)
        continue;
      std::sort(holders.begin(), holders.end());
      for (uint32_t tensor = 0; tensor < tile.tensors; ++tensor)
        shards.push_back({t, tensor, group, group != mainGroup, holders, tile.bytes, -1});
    }
  }
  elect(layout, transfers, shards);
  return shards;
}

int64_t megatronLoad(const Layout &layout, const Transfers &transfers) {
  std::map<int32_t, int64_t> load;
  int64_t most = 0;
  for (const Shard &shard : megatronDistribution(layout, transfers))
    most = std::max(most, load[shard.rank] += shard.bytes);
  return most;
}

} // namespace reshard
