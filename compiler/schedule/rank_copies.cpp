// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/rank_copies.h"

namespace reshard {

using namespace ir;

RankCopies::RankCopies(const Layout &layout) : layout_(layout), copies_(layout) {
  if (copies_.targets() == 1)
    return;
  auto meshRanks = [&](const Endpoint &endpoint) {
    std::vector<int32_t> on(static_cast<size_t>(layout.world), -1);
    for (size_t meshRank = 0; meshRank < endpoint.ranks.size(); ++meshRank)
      on[static_cast<size_t>(endpoint.ranks[meshRank])] = static_cast<int32_t>(meshRank);
    return on;
  };
  sourceOn_ = meshRanks(layout.endpoints[0]);
  targetOn_ = meshRanks(layout.endpoints[1]);
}

int32_t RankCopies::target(int32_t rank, int64_t copy) const {
  return layout_.endpoints[1].ranks[copies_.target().meshRank(targetOn(rank), copy)];
}

int32_t RankCopies::inFirstTarget(int32_t rank) const {
  const int32_t meshRank = targetOn(rank);
  return meshRank < 0 ? rank : layout_.endpoints[1].ranks[copies_.target().first(meshRank)];
}

RankCopies::First RankCopies::first(int32_t rank) const {
  if (copies_.sources() == 1)
    return {rank, 0};
  if (const int32_t meshRank = sourceOn_[static_cast<size_t>(rank)]; meshRank >= 0)
    return {layout_.endpoints[0].ranks[copies_.source().first(meshRank)], copies_.source().copy(meshRank)};
  const int32_t meshRank = targetOn(rank);
  if (meshRank < 0)
    return {rank, 0};
  const int64_t copy = copies_.target().copy(meshRank);
  const int32_t same = copies_.target().meshRank(copies_.target().first(meshRank), copy % copies_.each());
  return {layout_.endpoints[1].ranks[same], copy / copies_.each()};
}

int32_t RankCopies::repeating(int32_t first, int64_t copy) const {
  if (copy == 0)
    return first;
  if (const int32_t meshRank = sourceOn_[static_cast<size_t>(first)]; meshRank >= 0)
    return layout_.endpoints[0].ranks[copies_.source().meshRank(meshRank, copy)];
  const int32_t meshRank = targetOn(first);
  return layout_.endpoints[1].ranks[copies_.target().meshRank(copies_.target().first(meshRank),
                                                              copy * copies_.each() + copies_.target().copy(meshRank))];
}

} // namespace reshard
