// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/shard_distribution.h"

#include "compiler/transfer/candidates.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

int64_t groupOf(const Layout &layout, const Endpoint &endpoint, int64_t meshRank) {
  if (layout.files.group.empty())
    return 0;
  for (const Axis &axis : endpoint.axes)
    if (std::find(layout.files.group.begin(), layout.files.group.end(), axis.name) != layout.files.group.end())
      meshRank -= meshRank / axis.stride % axis.size * axis.stride;
  return meshRank;
}

void assignShards(const Layout &layout, const Transfers &transfers, std::vector<Shard> &shards) {
  std::stable_sort(shards.begin(), shards.end(), [&](const Shard &a, const Shard &b) {
    const std::string &x = layout.tensorPatterns[transfers.overlaps[a.overlap].pattern].name,
                      &y = layout.tensorPatterns[transfers.overlaps[b.overlap].pattern].name;
    return std::make_tuple(a.group, a.cross, a.replicas.size(), -a.bytes, std::cref(x), a.tensor, a.overlap) <
           std::make_tuple(b.group, b.cross, b.replicas.size(), -b.bytes, std::cref(y), b.tensor, b.overlap);
  });
  std::vector<int64_t> load(layout.world);
  for (Shard &shard : shards) {
    shard.rank = *std::min_element(shard.replicas.begin(), shard.replicas.end(),
                                   [&](int32_t a, int32_t b) { return std::tie(load[a], a) < std::tie(load[b], b); });
    load[shard.rank] += shard.bytes;
  }
}

std::vector<Shard> megatronDistribution(const Layout &layout, const Transfers &transfers) {
  const Endpoint &source = layout.endpoints[0];
  Candidates candidates(layout);
  std::vector<Shard> shards;
  for (uint32_t t = 0; t < transfers.overlaps.size(); ++t) {
    const Overlap &overlap = transfers.overlaps[t];
    const Endpoint &target = layout.endpoints[overlap.endpoint];
    if (overlap.pattern < 0 || source.storage == target.storage)
      continue;
    candidates.select(overlap);
    const Endpoint &ranks = source.storage ? target : source;
    std::map<int64_t, std::vector<int32_t>> groups;
    int32_t main = INT32_MAX;
    int64_t mainGroup = 0;
    for (int32_t meshRank : source.storage ? llvm::ArrayRef(overlap.targets) : llvm::ArrayRef(candidates.all())) {
      const int64_t group = groupOf(layout, ranks, meshRank);
      groups[group].push_back(ranks.ranks[meshRank]);
      if (ranks.ranks[meshRank] < main) {
        main = ranks.ranks[meshRank];
        mainGroup = group;
      }
    }
    for (auto &[group, replicas] : groups) {
      if (!source.storage && group != mainGroup)
        continue;
      std::sort(replicas.begin(), replicas.end());
      for (uint32_t tensor = 0; tensor < overlap.tensors; ++tensor)
        shards.push_back({t, tensor, group, group != mainGroup, replicas, overlap.bytes, -1});
    }
  }
  assignShards(layout, transfers, shards);
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
