// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/candidates.h"

#include <algorithm>

namespace reshard {

using namespace ir;

Candidates::Candidates(const Layout &layout)
    : layout_(layout), source_(layout.endpoints[0]), meshRankOfRank_(layout.world, -1) {
  if (!source_.storage)
    for (size_t meshRank = 0; meshRank < source_.ranks.size(); ++meshRank)
      meshRankOfRank_[source_.ranks[meshRank]] = static_cast<int32_t>(meshRank);
}

void Candidates::select(const Overlap &overlap) {
  overlap_ = &overlap;
  replicas_.clear();
  used_ = 0;
  for (const ReplicaGroup &replicaGroup : overlap.replicaGroups)
    replicas_.insert(replicas_.end(), replicaGroup.meshRanks.begin(), replicaGroup.meshRanks.end());
  std::sort(replicas_.begin(), replicas_.end());
  replicas_.erase(std::unique(replicas_.begin(), replicas_.end()), replicas_.end());
  if (overlap.pattern >= 0 && layout_.topology.ranksPerNode > 0 && !source_.storage)
    for (int32_t meshRank : replicas_)
      node(layout_.topology.node(source_.ranks[meshRank])).replicas.push_back(meshRank);
}

Candidates::Node &Candidates::node(int64_t number) {
  const auto end = nodes_.begin() + static_cast<ptrdiff_t>(used_);
  if (used_ > 0 && std::prev(end)->number == number) // the usual case, because replicas ascend
    return *std::prev(end);
  const auto at = std::lower_bound(nodes_.begin(), end, number,
                                   [](const Node &node, int64_t wanted) { return node.number < wanted; });
  if (at != end && at->number == number)
    return *at;
  const auto index = at - nodes_.begin();
  if (used_ == nodes_.size())
    nodes_.emplace_back();
  nodes_[used_].number = number;
  nodes_[used_].replicas.clear();
  std::rotate(nodes_.begin() + index, nodes_.begin() + static_cast<ptrdiff_t>(used_),
              nodes_.begin() + static_cast<ptrdiff_t>(used_) + 1);
  ++used_;
  return nodes_[index];
}

int32_t Candidates::rankOf(int32_t target) const {
  const Endpoint &endpoint = layout_.endpoints[overlap_->endpoint];
  return endpoint.storage ? -1 : endpoint.ranks[target];
}

std::optional<int32_t> Candidates::own(int32_t target) const {
  if (overlap_->pattern < 0)
    return -1;
  const int32_t rank = rankOf(target), meshRank = rank < 0 ? -1 : meshRankOfRank_[rank];
  if (meshRank >= 0 && std::binary_search(replicas_.begin(), replicas_.end(), meshRank))
    return meshRank;
  return std::nullopt;
}

bool Candidates::remote(int32_t target) const {
  return !source_.storage && !layout_.endpoints[overlap_->endpoint].storage && !own(target);
}

int64_t Candidates::nodeOf(int32_t target) const {
  const int32_t rank = rankOf(target);
  return rank < 0 ? -1 : layout_.topology.node(rank);
}

const std::vector<int32_t> &Candidates::onNode(int64_t node) const {
  static const std::vector<int32_t> none;
  const auto end = nodes_.begin() + static_cast<ptrdiff_t>(used_);
  const auto found =
      std::lower_bound(nodes_.begin(), end, node, [](const Node &n, int64_t wanted) { return n.number < wanted; });
  return found == end || found->number != node ? none : found->replicas;
}

const std::vector<int32_t> &Candidates::preferred(int32_t target) const {
  const std::vector<int32_t> &onTargetNode = onNode(nodeOf(target));
  return onTargetNode.empty() ? replicas_ : onTargetNode;
}

uint32_t Candidates::replicaGroupOf(const Overlap &overlap, int32_t meshRank) {
  uint32_t h = 0;
  while (!std::binary_search(overlap.replicaGroups[h].meshRanks.begin(), overlap.replicaGroups[h].meshRanks.end(),
                             meshRank))
    ++h;
  return h;
}

} // namespace reshard
