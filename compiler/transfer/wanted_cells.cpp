// SPDX-License-Identifier: Apache-2.0
// A tensor pattern that one target param holds in shards that are pairwise disjoint has disjoint overlaps. For other
// patterns the positions of each overlap are found along each dimension. Overlaps with equal holders then split each
// other, like the cells of the pass overlap.
#include "compiler/transfer/wanted_cells.h"

#include "compiler/resolve/interner.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace reshard {

using namespace ir;

namespace {

using Wants = std::vector<const Overlap *>;
using SetNumbers = llvm::SmallVector<unsigned, 2>; // by dimension

/// Sets of positions, by number. The empty set is 0.
class WantedSets {
public:
  WantedSets() { sets_.intern({}); }

  /// The `from` positions of a relation.
  unsigned from(const IndexMap &relation) {
    IndexMap set = relation;
    for (IndexBlock &block : set) {
      block.to = block.from;
      block.toStep = block.fromStep;
    }
    return sets_.intern(normalize(std::move(set)));
  }
  unsigned common(unsigned a, unsigned b) {
    if (a == b)
      return a;
    auto [at, added] = common_.try_emplace({a, b});
    if (added)
      at->second = disjointFrom(sets_[a], sets_[b]) ? 0 : from(restrict(sets_[a], sets_[b]));
    return at->second;
  }
  /// The positions of `a` that `b` lacks.
  unsigned without(unsigned a, unsigned b) {
    if (a == b)
      return 0;
    auto [at, added] = without_.try_emplace({a, b});
    if (added)
      at->second = from(difference(sets_[a], sets_[b]));
    return at->second;
  }
  int64_t size(unsigned set) const { return positionCount(sets_[set]); }

private:
  Interner<IndexMap> sets_;
  std::map<std::pair<unsigned, unsigned>, unsigned> common_, without_;
};

/// A product of sets, and the overlaps that want its elements.
struct Box {
  SetNumbers sets;
  Wants wants;
};

class WantedCells {
public:
  WantedCells(const Layout &layout, const Transfers &transfers, const std::function<void(const WantedCell &)> &visit)
      : layout_(layout), transfers_(transfers), visit_(visit) {}

  void run() {
    const Endpoint &source = layout_.endpoints[0];
    std::vector<Wants> byPattern(layout_.tensorPatterns.size());
    for (const Overlap &overlap : transfers_.overlaps)
      if (overlap.pattern >= 0 && !source.storage && !layout_.endpoints[overlap.endpoint].storage)
        byPattern[overlap.pattern].push_back(&overlap);
    for (const Wants &overlaps : byPattern)
      if (disjoint(overlaps))
        for (const Overlap *each : overlaps) {
          findHolders(*each);
          visit(elements(*each), holders_, each);
        }
      else
        split(overlaps);
  }

private:
  int64_t elements(const Overlap &overlap) const {
    return overlap.tensors * (overlap.bytes / itemBytes(layout_.tensorPatterns[overlap.pattern].dtype));
  }

  void visit(int64_t elements, const std::vector<int32_t> &holders, llvm::ArrayRef<const Overlap *> wants) const {
    visit_({wants[0]->pattern, elements, holders, wants});
  }

  void findHolders(const Overlap &overlap) {
    holders_.clear();
    for (const ReplicaGroup &replicaGroup : overlap.replicaGroups)
      for (int32_t meshRank : replicaGroup.meshRanks)
        holders_.push_back(layout_.endpoints[0].ranks[meshRank]);
    std::sort(holders_.begin(), holders_.end());
    holders_.erase(std::unique(holders_.begin(), holders_.end()), holders_.end());
  }

  const Part &partOf(const Overlap &overlap) const {
    return layout_.endpoints[overlap.endpoint].params[overlap.param].parts[overlap.part];
  }
  /// The coordinate of the first mesh rank of an overlap's targets over the axes of a dimension's sharding.
  int64_t coordinateOf(const Overlap &overlap, const PartDimension &dimension) const {
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    const Sharding &sharding = target.shardings[dimension.sharding];
    return coordinate(target, sharding.axes, overlap.targets[0]);
  }

  /// Whether the overlaps of a pattern are known to be pairwise disjoint: they are those of one part, whose shards are
  /// pairwise disjoint in each dimension, and no two rank classes hold the same shard.
  bool disjoint(const Wants &overlaps) {
    if (overlaps.size() <= 1)
      return true;
    const Overlap &first = *overlaps[0];
    for (const Overlap *each : overlaps)
      if (each->endpoint != first.endpoint || each->param != first.param || each->part != first.part)
        return false;
    for (const PartDimension &dimension : partOf(first).dimensions)
      if (!disjointShards(first.endpoint, dimension.sharding))
        return false;
    std::map<std::vector<unsigned>, int32_t> classOf; // by shard
    int32_t previous = -1;
    for (const Overlap *each : overlaps) {
      if (each->targets[0] == previous) // the overlaps of a class follow each other
        continue;
      previous = each->targets[0];
      std::vector<unsigned> shard;
      for (const PartDimension &dimension : partOf(first).dimensions)
        shard.push_back(shards_.at({first.endpoint, dimension.sharding})[coordinateOf(*each, dimension)]);
      if (classOf.try_emplace(std::move(shard), previous).first->second != previous)
        return false;
    }
    return true;
  }

  /// Whether the index maps of a sharding are pairwise equal or disjoint. Numbers them in shards_.
  bool disjointShards(unsigned endpoint, unsigned sharding) {
    const auto [at, added] = shards_.try_emplace({endpoint, sharding});
    if (!added)
      return !at->second.empty();
    const std::vector<IndexMap> &maps = layout_.endpoints[endpoint].shardings[sharding].at;
    Interner<IndexMap> distinct;
    std::vector<unsigned> numbers;
    numbers.reserve(maps.size());
    for (const IndexMap &map : maps)
      numbers.push_back(distinct.intern(map));
    int64_t count = 0;
    for (unsigned n = 0; n < distinct.size(); ++n)
      count += runCount(distinct[n]);
    if (count > kMaxRuns)
      return false;
    std::vector<std::pair<int64_t, int64_t>> runs;
    runs.reserve(count);
    for (unsigned n = 0; n < distinct.size(); ++n)
      for (const IndexBlock &block : distinct[n])
        for (int64_t i = 0; i < block.count; ++i)
          runs.emplace_back(block.from + i * block.fromStep, block.from + i * block.fromStep + block.length);
    std::sort(runs.begin(), runs.end());
    for (size_t i = 1; i < runs.size(); ++i)
      if (runs[i].first < runs[i - 1].second)
        return false;
    at->second = std::move(numbers);
    return true;
  }

  /// The sets of positions of an overlap.
  SetNumbers setsOf(const Overlap &overlap) {
    const std::vector<Sharding> &shardings = layout_.endpoints[overlap.endpoint].shardings;
    const Part &part = partOf(overlap);
    SetNumbers result;
    for (size_t d = 0; d < part.dimensions.size(); ++d) {
      const unsigned sharding = part.dimensions[d].sharding, relation = overlap.replicaGroups[0].relations[d];
      const int64_t coordinate = coordinateOf(overlap, part.dimensions[d]);
      const auto [at, added] = setOf_.try_emplace({overlap.endpoint, sharding, coordinate, relation});
      if (added)
        at->second = sets_.from(compose(shardings[sharding].at[coordinate], inverse(transfers_.relations[relation])));
      result.push_back(at->second);
    }
    return result;
  }

  void split(const Wants &overlaps) {
    std::map<std::vector<int32_t>, Wants> byHolders;
    for (const Overlap *each : overlaps) {
      findHolders(*each);
      byHolders[holders_].push_back(each);
    }
    for (const auto &[holders, wants] : byHolders) {
      if (wants.size() == 1) {
        visit(elements(*wants[0]), holders, wants);
        continue;
      }
      for (const Box &box : boxesOf(wants)) {
        int64_t count = 1;
        for (unsigned set : box.sets)
          count *= sets_.size(set);
        visit(count, holders, box.wants);
      }
    }
  }

  /// Disjoint boxes of the elements of some overlaps.
  std::vector<Box> boxesOf(const Wants &overlaps) {
    std::vector<Box> distinct;
    std::unordered_map<SetNumbers, size_t, ValueHash> numbers;
    for (const Overlap *each : overlaps) {
      SetNumbers sets = setsOf(*each);
      const auto [at, added] = numbers.try_emplace(sets, distinct.size());
      if (added)
        distinct.push_back({std::move(sets), {}});
      distinct[at->second].wants.push_back(each);
    }
    std::vector<Box> result;
    for (Box &box : distinct) {
      if ((pairs_ += static_cast<int64_t>(result.size())) > kMaxPairs)
        break;
      add(std::move(box), result);
    }
    return result;
  }

  /// Adds a box to disjoint ones: those that it shares elements with are split.
  void add(Box box, std::vector<Box> &disjoint) {
    std::vector<SetNumbers> rest = {box.sets};                      // what no box before k has of it
    for (size_t k = 0; k < disjoint.size() && !rest.empty(); ++k) { // also the rests of boxes that were split
      std::vector<SetNumbers> left;
      for (SetNumbers &sets : rest) {
        const std::optional<SetNumbers> both = common(disjoint[k].sets, sets);
        if (!both) {
          left.push_back(std::move(sets));
          continue;
        }
        for (SetNumbers &other : without(sets, *both))
          left.push_back(std::move(other));
        Box shared{*both, disjoint[k].wants};
        for (SetNumbers &other : without(disjoint[k].sets, *both))
          disjoint.push_back({std::move(other), disjoint[k].wants});
        shared.wants.insert(shared.wants.end(), box.wants.begin(), box.wants.end());
        disjoint[k] = std::move(shared);
      }
      rest = std::move(left);
    }
    for (SetNumbers &sets : rest)
      disjoint.push_back({std::move(sets), box.wants});
  }

  std::optional<SetNumbers> common(const SetNumbers &a, const SetNumbers &b) {
    SetNumbers result;
    for (size_t d = 0; d < a.size(); ++d)
      if (result.push_back(sets_.common(a[d], b[d])); result.back() == 0)
        return std::nullopt;
    return result;
  }

  /// The elements of `all` that `part`, which lies within it, lacks: a box for each dimension.
  std::vector<SetNumbers> without(const SetNumbers &all, const SetNumbers &part) {
    std::vector<SetNumbers> result;
    SetNumbers sets = all;
    for (size_t d = 0; d < all.size(); ++d) {
      sets[d] = sets_.without(all[d], part[d]);
      if (sets[d] != 0)
        result.push_back(sets);
      sets[d] = part[d];
    }
    return result;
  }

  static constexpr int64_t kMaxPairs = 1 << 21, kMaxRuns = 1 << 20;

  const Layout &layout_;
  const Transfers &transfers_;
  const std::function<void(const WantedCell &)> &visit_;
  std::map<std::pair<unsigned, unsigned>, std::vector<unsigned>> shards_; // by endpoint, sharding: by coordinate
  WantedSets sets_;
  std::map<std::tuple<unsigned, unsigned, int64_t, unsigned>, unsigned>
      setOf_; // endpoint, sharding, coordinate, relation
  int64_t pairs_ = 0;
  std::vector<int32_t> holders_; // ranks that hold the present overlap
};

} // namespace

void forEachWantedCell(const Layout &layout, const Transfers &transfers,
                       const std::function<void(const WantedCell &)> &visit) {
  WantedCells(layout, transfers, visit).run();
}

} // namespace reshard
