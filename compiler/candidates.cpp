#include "compiler/candidates.h"

#include <algorithm>

namespace reshard {

using namespace ir;

Candidates::Candidates(const Layout &layout)
    : layout_(layout), source_(layout.endpoints[0]), placeOfRank_(layout.world, -1) {
  if (!source_.storage)
    for (size_t place = 0; place < source_.ranks.size(); ++place)
      placeOfRank_[source_.ranks[place]] = static_cast<int32_t>(place);
}

void Candidates::select(const Tile &tile) {
  tile_ = &tile;
  holders_.clear();
  used_ = 0;
  for (const Holder &holder : tile.holders)
    holders_.insert(holders_.end(), holder.places.begin(), holder.places.end());
  std::sort(holders_.begin(), holders_.end());
  holders_.erase(std::unique(holders_.begin(), holders_.end()), holders_.end());
  if (tile.family >= 0 && layout_.topology.ranksPerNode > 0 && !source_.storage)
    for (int32_t place : holders_)
      node(layout_.topology.node(source_.ranks[place])).holders.push_back(place);
}

Candidates::Node &Candidates::node(int64_t number) {
  const auto end = nodes_.begin() + static_cast<ptrdiff_t>(used_);
  if (used_ > 0 && std::prev(end)->number == number) // the rule: holders ascend
    return *std::prev(end);
  const auto at = std::lower_bound(nodes_.begin(), end, number,
                                   [](const Node &node, int64_t wanted) { return node.number < wanted; });
  if (at != end && at->number == number)
    return *at;
  const auto index = at - nodes_.begin();
  if (used_ == nodes_.size())
    nodes_.emplace_back();
  nodes_[used_].number = number;
  nodes_[used_].holders.clear();
  std::rotate(nodes_.begin() + index, nodes_.begin() + static_cast<ptrdiff_t>(used_),
              nodes_.begin() + static_cast<ptrdiff_t>(used_) + 1);
  ++used_;
  return nodes_[index];
}

int32_t Candidates::rankOf(int32_t target) const {
  const Endpoint &endpoint = layout_.endpoints[tile_->endpoint];
  return endpoint.storage ? -1 : endpoint.ranks[target];
}

std::optional<int32_t> Candidates::own(int32_t target) const {
  if (tile_->family < 0)
    return -1;
  const int32_t rank = rankOf(target), place = rank < 0 ? -1 : placeOfRank_[rank];
  if (place >= 0 && std::binary_search(holders_.begin(), holders_.end(), place))
    return place;
  return std::nullopt;
}

bool Candidates::remote(int32_t target) const {
  return !source_.storage && !layout_.endpoints[tile_->endpoint].storage && !own(target);
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
  return found == end || found->number != node ? none : found->holders;
}

const std::vector<int32_t> &Candidates::near(int32_t target) const {
  const std::vector<int32_t> &here = onNode(nodeOf(target));
  return here.empty() ? holders_ : here;
}

uint32_t Candidates::holderOf(const Tile &tile, int32_t place) {
  uint32_t h = 0;
  while (!std::binary_search(tile.holders[h].places.begin(), tile.holders[h].places.end(), place))
    ++h;
  return h;
}

} // namespace reshard
