#include "compiler/floors.h"

#include <algorithm>
#include <map>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// The source places that may serve one target of a tile: none where the target holds the piece itself.
class Choices {
public:
  explicit Choices(const Layout &layout) : layout_(layout), source_(layout.endpoints[0]) {
    placeOfRank_.assign(layout.world, -1);
    if (!source_.storage)
      for (size_t place = 0; place < source_.ranks.size(); ++place)
        placeOfRank_[source_.ranks[place]] = static_cast<int32_t>(place);
  }

  /// All places that hold the tile, ascending.
  std::vector<int32_t> holders(const Tile &tile) const {
    std::vector<int32_t> places;
    for (const Holder &holder : tile.holders)
      places.insert(places.end(), holder.places.begin(), holder.places.end());
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    return places;
  }

  bool remote(const Tile &tile, const std::vector<int32_t> &holders, int32_t target) const {
    if (tile.family < 0 || source_.storage || layout_.endpoints[tile.endpoint].storage)
      return false;
    const int32_t own = placeOfRank_[layout_.endpoints[tile.endpoint].ranks[target]];
    return own < 0 || !std::binary_search(holders.begin(), holders.end(), own);
  }

  std::vector<int32_t> ofNode(const Tile &tile, const std::vector<int32_t> &holders, int32_t target) const {
    if (layout_.topology.ranksPerNode == 0)
      return holders;
    const int64_t node = layout_.topology.node(layout_.endpoints[tile.endpoint].ranks[target]);
    std::vector<int32_t> near;
    for (int32_t place : holders)
      if (layout_.topology.node(source_.ranks[place]) == node)
        near.push_back(place);
    return near.empty() ? holders : near;
  }

private:
  const Layout &layout_;
  const Endpoint &source_;
  std::vector<int32_t> placeOfRank_;
};

int64_t ceilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

} // namespace

int64_t egressFloor(const Layout &layout, const Transfers &transfers, uint32_t generation) {
  const Choices choices(layout);
  std::map<std::vector<int32_t>, int64_t> classes; // candidate set -> bytes
  for (const Tile &tile : transfers.tiles) {
    const std::vector<int32_t> holders = choices.holders(tile);
    for (int32_t target : tile.targets)
      if (layout.endpoints[tile.endpoint].generation(target) <= generation && choices.remote(tile, holders, target))
        classes[choices.ofNode(tile, holders, target)] += tile.bytes * tile.tensors;
  }
  std::map<int32_t, int64_t> forced; // bytes that only this place can send
  int64_t total = 0, floor = 0;
  std::vector<int32_t> everybody;
  for (const auto &[places, bytes] : classes) {
    total += bytes;
    everybody.insert(everybody.end(), places.begin(), places.end());
    if (places.size() == 1)
      forced[places[0]] = bytes;
  }
  std::sort(everybody.begin(), everybody.end());
  everybody.erase(std::unique(everybody.begin(), everybody.end()), everybody.end());
  if (!everybody.empty())
    floor = ceilDivide(total, static_cast<int64_t>(everybody.size()));
  for (const auto &[places, bytes] : classes) {
    int64_t within = places.size() == 1 ? 0 : bytes;
    for (int32_t place : places)
      if (auto at = forced.find(place); at != forced.end())
        within += at->second;
    floor = std::max(floor, ceilDivide(within, static_cast<int64_t>(places.size())));
  }
  return floor;
}

int64_t ingressFloor(const Layout &layout, const Transfers &transfers) {
  const Choices choices(layout);
  std::map<int32_t, int64_t> received; // by world rank
  for (const Tile &tile : transfers.tiles) {
    const std::vector<int32_t> holders = choices.holders(tile);
    for (int32_t target : tile.targets)
      if (choices.remote(tile, holders, target))
        received[layout.endpoints[tile.endpoint].ranks[target]] += tile.bytes * tile.tensors;
  }
  int64_t most = 0;
  for (const auto &[rank, bytes] : received)
    most = std::max(most, bytes);
  return most;
}

} // namespace reshard
