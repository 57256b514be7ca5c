// SPDX-License-Identifier: Apache-2.0
#include "executor/load/mesh_rank_index.h"

#include <algorithm>

namespace reshard {

MeshRankIndex::MeshRankIndex(const schema::Manifest &manifest) {
  for (const schema::Endpoint *endpoint : *manifest.endpoints()) {
    auto &list = meshRanks_.emplace_back();
    list.reserve(endpoint->ranks()->size());
    for (uint32_t meshRank = 0; meshRank < endpoint->ranks()->size(); ++meshRank)
      list.emplace_back(endpoint->ranks()->Get(meshRank), meshRank);
    std::sort(list.begin(), list.end());
  }
}

std::optional<uint32_t> MeshRankIndex::find(uint32_t endpoint, uint32_t rank) const {
  const auto &list = meshRanks_[endpoint];
  const auto at = std::lower_bound(list.begin(), list.end(), std::pair(rank, uint32_t{0}));
  return at == list.end() || at->first != rank ? std::nullopt : std::optional(at->second);
}

} // namespace reshard
