// balance: a source for every open transfer. A target that holds the piece already takes it from itself; else from its
// own node; else from anywhere. Transfers with the same candidates form a class; the fractional optimum over the
// classes (optimum.h) says how many bytes each place gives to each class, and the class's transfers, target by target,
// are dealt out in that proportion: cut between tensors, or inside one where whole tensors would miss by more than
// kTolerance of the optimum. Targets that joined later (--keep) are planned after those before them, which so keep what
// they had.

#include "compiler/candidates.h"
#include "compiler/optimum.h"
#include "compiler/pass.h"
#include "compiler/split.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// A cut may miss its place by the optimum divided by this; misses do not add up, since each class makes up for those
/// before it.
constexpr int64_t kTolerance = 512;
/// The most pieces that are moved afterwards.
constexpr int kMoves = 64;

class Balancer {
public:
  explicit Balancer(Module &module)
      : module_(module), layout_(module.layout), candidates_(module.layout), splitter_(module),
        load_(module.layout.endpoints[0].places()) {}

  void run() {
    std::vector<Transfer> all = std::move(module_.transfers.transfers);
    module_.transfers.transfers.clear();
    std::stable_sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) { return a.tile < b.tile; });
    for (const Transfer &transfer : all)
      if (transfer.source != Transfer::kOpen)
        module_.transfers.transfers.push_back(transfer);
    for (uint32_t generation = 0; generation <= last(); ++generation)
      run(all, generation);
    order();
  }

private:
  uint32_t generationOf(const Transfer &transfer) const {
    return layout_.endpoints[module_.transfers.tiles[transfer.tile].endpoint].generation(transfer.target);
  }

  uint32_t last() const {
    uint32_t last = 0;
    for (const Endpoint &endpoint : layout_.endpoints)
      for (uint32_t generation : endpoint.generations)
        last = std::max(last, generation);
    return last;
  }

  void run(const std::vector<Transfer> &all, uint32_t generation) {
    std::vector<SendClass> classes;
    std::vector<std::vector<Transfer>> open; // by class
    std::map<std::vector<int32_t>, size_t> numbers;
    const Tile *tile = nullptr;
    std::map<const std::vector<int32_t> *, size_t> ofTile;
    for (const Transfer &transfer : all) {
      if (transfer.source != Transfer::kOpen || generationOf(transfer) != generation)
        continue;
      if (tile != &module_.transfers.tiles[transfer.tile]) {
        tile = &module_.transfers.tiles[transfer.tile];
        candidates_.select(*tile);
        ofTile.clear();
      }
      if (const auto own = candidates_.own(transfer.target)) {
        assign(transfer, *own); // which costs nothing
        continue;
      }
      const std::vector<int32_t> &places = candidates_.near(transfer.target);
      auto [at, added] = ofTile.try_emplace(&places);
      if (added) {
        at->second = numbers.try_emplace(places, classes.size()).first->second;
        if (at->second == classes.size()) {
          classes.push_back({places, 0});
          open.emplace_back();
        }
      }
      classes[at->second].bytes += bytes(module_.transfers, transfer);
      open[at->second].push_back(transfer);
    }
    const Optimum best = optimum(classes, load_);
    std::vector<int64_t> owed(load_.size());   // what places gave less than they should have, so far
    std::vector<size_t> order(classes.size()); // those with many candidates last: they make up best
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return classes[a].places.size() < classes[b].places.size(); });
    const size_t first = module_.transfers.transfers.size();
    const std::vector<int64_t> before = load_;
    for (size_t c : order)
      deal(classes[c], open[c], best.bytes[c], best.load / kTolerance, owed);
    for (int moves = 0; moves < kMoves && relieve(first, best.load); ++moves)
      ;
    neverWorse(classes, open, first, before);
  }

  /// Where a round-robin by target rank, which cuts nothing, happens to be better than what cuts at units allow, takes
  /// that. `before`: the load without these transfers, which stand from `first` on.
  void neverWorse(const std::vector<SendClass> &classes, const std::vector<std::vector<Transfer>> &open, size_t first,
                  const std::vector<int64_t> &before) {
    std::vector<int64_t> load = before;
    auto place = [&](size_t c, const Transfer &transfer) {
      const Endpoint &target = layout_.endpoints[module_.transfers.tiles[transfer.tile].endpoint];
      return classes[c].places[static_cast<size_t>(target.ranks[transfer.target]) % classes[c].places.size()];
    };
    for (size_t c = 0; c < classes.size(); ++c)
      for (const Transfer &transfer : open[c])
        load[place(c, transfer)] += bytes(module_.transfers, transfer);
    if (load.empty() || *std::max_element(load.begin(), load.end()) >= *std::max_element(load_.begin(), load_.end()))
      return;
    load_ = std::move(load);
    module_.transfers.transfers.resize(first);
    for (size_t c = 0; c < classes.size(); ++c)
      for (const Transfer &transfer : open[c])
        assign(transfer, place(c, transfer));
  }

  /// Where indivisible pieces are large beside the optimum, dealing may overshoot: moves something of the busiest
  /// place, of transfers from `first` on, to where it makes less of a difference. Whether it could.
  bool relieve(size_t first, int64_t optimum) {
    const auto busiest = static_cast<int32_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
    if (load_.empty() || load_[busiest] <= optimum + optimum / 128)
      return false;
    std::vector<Transfer> &all = module_.transfers.transfers;
    for (size_t i = first; i < all.size(); ++i) {
      if (all[i].source != busiest)
        continue;
      candidates_.select(module_.transfers.tiles[all[i].tile]);
      const std::vector<int32_t> &places = candidates_.near(all[i].target);
      const int32_t idlest =
          *std::min_element(places.begin(), places.end(), [&](int32_t a, int32_t b) { return load_[a] < load_[b]; });
      std::vector<Transfer> head, rest;
      splitter_.split(all[i], (load_[busiest] - load_[idlest]) / 2, 0, head, rest);
      int64_t moved = 0;
      for (const Transfer &part : head)
        moved += bytes(module_.transfers, part);
      if (moved == 0 || load_[idlest] + moved >= load_[busiest])
        continue;
      all.erase(all.begin() + static_cast<ptrdiff_t>(i));
      all.insert(all.end(), rest.begin(), rest.end());
      for (const Transfer &part : head)
        assign(part, idlest);
      load_[busiest] -= moved;
      load_[idlest] += moved;
      return true;
    }
    return false;
  }

  /// Deals a class's transfers out to its places, each taking what follows the one before it.
  void deal(const SendClass &each, std::vector<Transfer> transfers, const std::vector<int64_t> &wanted,
            int64_t tolerance, std::vector<int64_t> &owed) {
    std::stable_sort(transfers.begin(), transfers.end(), [&](const Transfer &a, const Transfer &b) {
      return std::make_tuple(module_.transfers.tiles[a.tile].endpoint, a.target) <
             std::make_tuple(module_.transfers.tiles[b.tile].endpoint, b.target);
    });
    std::deque<Transfer> left(transfers.begin(), transfers.end());
    int64_t carried = 0; // what the places before took less than their quota
    for (size_t i = 0; i < each.places.size(); ++i) {
      const int32_t place = each.places[i];
      const bool final = std::all_of(wanted.begin() + static_cast<ptrdiff_t>(i) + 1, wanted.end(),
                                     [](int64_t bytes) { return bytes == 0; });
      if (wanted[i] == 0)
        continue;
      const int64_t quota = wanted[i] + owed[place] + carried;
      int64_t given = 0;
      while (!left.empty() && (final || given < quota)) {
        const Transfer next = left.front();
        const int64_t size = bytes(module_.transfers, next);
        left.pop_front();
        if (final || given + size <= quota) {
          assign(next, place);
          given += size;
          continue;
        }
        std::vector<Transfer> head, rest;
        splitter_.split(next, quota - given, tolerance, head, rest);
        for (const Transfer &part : head) {
          assign(part, place);
          given += bytes(module_.transfers, part);
        }
        left.insert(left.begin(), rest.begin(), rest.end());
        break;
      }
      carried = quota - given;
      owed[place] += wanted[i] - given;
      load_[place] += given;
    }
  }

  void assign(Transfer transfer, int32_t place) {
    transfer.source = place;
    transfer.holder = Candidates::holderOf(module_.transfers.tiles[transfer.tile], place);
    module_.transfers.transfers.push_back(transfer);
  }

  /// By tile, target, tensor, cut; neighbouring runs from one source become one.
  void order() {
    std::vector<Transfer> &all = module_.transfers.transfers;
    std::sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.tile, a.target, a.first, a.begin) < std::tie(b.tile, b.target, b.first, b.begin);
    });
    size_t kept = 0;
    for (size_t i = 1; i < all.size(); ++i) {
      Transfer &last = all[kept];
      const Transfer &next = all[i];
      const bool same = last.tile == next.tile && last.target == next.target && last.source == next.source &&
                        last.holder == next.holder && last.route == next.route;
      if (same && !last.cut() && !next.cut() && last.first + last.count == next.first)
        last.count += next.count;
      else if (same && last.cut() && next.cut() && last.first == next.first && last.end == next.begin)
        last.end = next.end;
      else
        all[++kept] = next;
    }
    if (!all.empty())
      all.resize(kept + 1);
  }

  Module &module_;
  const Layout &layout_;
  Candidates candidates_;
  Splitter splitter_;
  std::vector<int64_t> load_; // bytes to send, by source place
};

} // namespace

std::string balance(Module &module) {
  Balancer(module).run();
  return {};
}

} // namespace reshard
