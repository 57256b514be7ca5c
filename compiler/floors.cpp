#include "compiler/floors.h"

#include "compiler/candidates.h"
#include "compiler/optimum.h"

#include <algorithm>
#include <map>
#include <vector>

namespace reshard {

using namespace ir;

int64_t egressFloor(const Layout &layout, const Transfers &transfers, bool local, uint32_t generation) {
  Candidates candidates(layout);
  std::map<std::vector<int32_t>, int64_t> bytes; // by candidates
  for (const Tile &tile : transfers.tiles) {
    candidates.select(tile);
    std::map<const std::vector<int32_t> *, int64_t> ofTile;
    for (int32_t target : tile.targets)
      if (layout.endpoints[tile.endpoint].generation(target) <= generation && candidates.remote(target))
        ofTile[local ? &candidates.near(target) : &candidates.all()] += tile.bytes * tile.tensors;
    for (const auto &[places, sum] : ofTile)
      bytes[*places] += sum;
  }
  std::vector<SendClass> classes;
  for (const auto &[places, sum] : bytes)
    classes.push_back({places, sum});
  return optimum(classes, std::vector<int64_t>(layout.endpoints[0].places())).load;
}

int64_t ingressFloor(const Layout &layout, const Transfers &transfers) {
  Candidates candidates(layout);
  std::map<int32_t, int64_t> received; // by world rank
  for (const Tile &tile : transfers.tiles) {
    candidates.select(tile);
    for (int32_t target : tile.targets)
      if (candidates.remote(target))
        received[layout.endpoints[tile.endpoint].ranks[target]] += tile.bytes * tile.tensors;
  }
  int64_t most = 0;
  for (const auto &[rank, bytes] : received)
    most = std::max(most, bytes);
  return most;
}

} // namespace reshard
