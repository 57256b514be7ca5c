// balance: one source for every transfer. A target that holds the piece already takes it from itself; else from its own node; else
// from anywhere: among the places that remain, the one with the fewest bytes to send so far. Transfers without a choice are
// counted first, then the largest are placed first (Graham's LPT rule: at most 4/3 of the optimum where all candidates are
// alike). The unit of choice is a tile and a target, so that a target has few senders; it is cut into runs of tensors where
// it is large beside the floor. Targets that joined later (--keep) are planned after those before them, which so keep what
// they had.

#include "compiler/floors.h"
#include "compiler/pass.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// A unit is cut where it exceeds the floor divided by this: the imbalance it can cause is then below 2 %.
constexpr int64_t kUnitsPerFloor = 64;

struct Candidate {
  uint32_t holder;
  int32_t place;
};

/// Some tensors of one tile for one target.
struct Unit {
  uint32_t tile, first, count;
  int32_t target;
  int64_t bytes;
};

class Balancer {
public:
  explicit Balancer(Module &module)
      : module_(module), layout_(module.layout), source_(layout_.endpoints[0]), load_(source_.places()) {
    placeOfRank_.assign(layout_.world, -1);
    if (!source_.storage)
      for (size_t place = 0; place < source_.ranks.size(); ++place)
        placeOfRank_[source_.ranks[place]] = static_cast<int32_t>(place);
  }

  void run() {
    uint32_t last = 0;
    for (const Endpoint &endpoint : layout_.endpoints)
      for (uint32_t generation : endpoint.generations)
        last = std::max(last, generation);
    for (uint32_t generation = 0; generation <= last; ++generation)
      run(generation);
    order();
  }

private:
  void run(uint32_t generation) {
    const std::vector<Tile> &tiles = module_.transfers.tiles;
    const int64_t largest =
        std::max<int64_t>(1, egressFloor(layout_, module_.transfers, generation) / kUnitsPerFloor);
    std::vector<Unit> open;
    for (uint32_t t = 0; t < tiles.size(); ++t) {
      const Tile &tile = tiles[t];
      const auto tensors = static_cast<uint32_t>(tile.tensors);
      for (int32_t target : tile.targets) {
        if (layout_.endpoints[tile.endpoint].generation(target) != generation)
          continue;
        const int32_t rank = rankOf(tile, target);
        if (const std::optional<Candidate> own = local(tile, rank)) {
          assign({t, 0, tensors, target, 0}, *own);
          continue;
        }
        candidates(tile, rank);
        if (candidates_.size() == 1) {
          assign({t, 0, tensors, target, tile.bytes * tile.tensors}, candidates_[0]);
          continue;
        }
        const int64_t run = std::clamp<int64_t>(largest / std::max<int64_t>(1, tile.bytes), 1, tensors);
        for (uint32_t first = 0; first < tensors; first += static_cast<uint32_t>(run)) {
          const auto count = static_cast<uint32_t>(std::min<int64_t>(run, tensors - first));
          open.push_back({t, first, count, target, tile.bytes * count});
        }
      }
    }
    std::stable_sort(open.begin(), open.end(), [](const Unit &a, const Unit &b) { return a.bytes > b.bytes; });
    for (const Unit &unit : open) {
      const Tile &tile = tiles[unit.tile];
      candidates(tile, rankOf(tile, unit.target));
      assign(unit, *std::min_element(candidates_.begin(), candidates_.end(), [&](Candidate a, Candidate b) {
        return std::tie(load_[a.place], a.place, a.holder) < std::tie(load_[b.place], b.place, b.holder);
      }));
    }
  }

  /// The world rank of a target place; -1 for a storage endpoint's file.
  int32_t rankOf(const Tile &tile, int32_t target) const {
    const Endpoint &endpoint = layout_.endpoints[tile.endpoint];
    return endpoint.storage ? -1 : endpoint.ranks[target];
  }

  std::optional<Candidate> local(const Tile &tile, int32_t rank) const {
    if (tile.family < 0)
      return Candidate{0, -1};
    const int32_t place = rank < 0 ? -1 : placeOfRank_[rank];
    if (place >= 0)
      for (uint32_t h = 0; h < tile.holders.size(); ++h)
        if (std::binary_search(tile.holders[h].places.begin(), tile.holders[h].places.end(), place))
          return Candidate{h, place};
    return std::nullopt;
  }

  /// Fills candidates_: the places on the target's node where there are some, else all.
  void candidates(const Tile &tile, int32_t rank) {
    candidates_.clear();
    const bool nodes = layout_.topology.ranksPerNode > 0 && rank >= 0 && !source_.storage;
    for (bool sameNode : {true, false}) {
      if (sameNode && !nodes)
        continue;
      for (uint32_t h = 0; h < tile.holders.size(); ++h)
        for (int32_t place : tile.holders[h].places)
          if (!sameNode || layout_.topology.node(source_.ranks[place]) == layout_.topology.node(rank))
            candidates_.push_back({h, place});
      if (!candidates_.empty())
        return;
    }
  }

  void assign(const Unit &unit, Candidate from) {
    if (from.place >= 0)
      load_[from.place] += unit.bytes;
    module_.transfers.transfers.push_back({unit.tile, unit.first, unit.count, from.holder, from.place, unit.target});
  }

  /// By tile, target, first tensor; neighbouring runs from one source become one.
  void order() {
    std::vector<Transfer> &all = module_.transfers.transfers;
    std::sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.tile, a.target, a.first) < std::tie(b.tile, b.target, b.first);
    });
    size_t kept = 0;
    for (size_t i = 1; i < all.size(); ++i) {
      Transfer &last = all[kept];
      const Transfer &next = all[i];
      if (last.tile == next.tile && last.target == next.target && last.source == next.source &&
          last.holder == next.holder && last.first + last.count == next.first)
        last.count += next.count;
      else
        all[++kept] = next;
    }
    if (!all.empty())
      all.resize(kept + 1);
  }

  Module &module_;
  const Layout &layout_;
  const Endpoint &source_;
  std::vector<int64_t> load_; // bytes to send, by source place
  std::vector<int32_t> placeOfRank_;
  std::vector<Candidate> candidates_;
};

} // namespace

std::string balance(Module &module) {
  Balancer(module).run();
  return {};
}

} // namespace reshard
