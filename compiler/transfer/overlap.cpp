// SPDX-License-Identifier: Apache-2.0
// overlap: intersects source and target. Every dimension of a tensor pattern, index variables included, is solved
// separately: the source's index maps of it are refined into cells (disjoint sets of positions; usually each index map
// is one cell), the cells that the target's index map intersects are found, and composing the two index maps gives the
// relation source position -> target position (periodic ones repeat with the least common multiple of the periods,
// ir/index_map.cpp). An overlap is one combination of cells. All mesh ranks that hold it are candidate sources.
//
// The ranges of flat buffers are not a product of cuts of dimensions: each range consists of its own boxes, and the
// cuts of one box would cut all others. For such patterns the boxes themselves are intersected, one by one.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/transfer/rank_classes.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/SmallVector.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// With at most this many sets, comparing each with each is as fast as an index.
constexpr size_t kFewSets = 64;
constexpr int64_t kMaxBlocks = 1 << 22;

/// The range [begin, end) from the first to the last logical position of an index map.
struct Bounds {
  int64_t begin, end;
};

Bounds bounds(const IndexMap &indexMap) {
  Bounds result{INT64_MAX, INT64_MIN};
  for (const IndexBlock &s : indexMap) {
    result.begin = std::min(result.begin, s.from);
    result.end = std::max(result.end, s.from + (s.count - 1) * s.fromStep + s.length);
  }
  return result;
}

/// The blocks of disjoint sets, ordered by position: finds the sets that an index map intersects without visiting each
/// set.
class BlockIndex {
public:
  /// Returns nothing if two sets overlap, or if the sets have more blocks than is worth listing.
  static std::optional<BlockIndex> of(const std::vector<const IndexMap *> &sets);
  /// The numbers of the sets that an index map intersects, ascending. Returns nothing if the index map has more blocks
  /// than all sets together: comparing it with each set is then faster.
  std::optional<llvm::SmallVector<unsigned, 1>> intersecting(const IndexMap &indexMap) const;

private:
  struct Block {
    int64_t begin, end;
    unsigned set;
  };
  std::vector<Block> blocks_;
};

class CommonRefinement {
public:
  /// Refines the distinct source index maps of a dimension into disjoint cells. Usually the index maps are pairwise
  /// disjoint, and each is one cell. Others (a tensor held under two shardings, or an index value placed twice) are
  /// refined by set differences.
  CommonRefinement(const std::vector<unsigned> &numbers, const Interner<IndexMap> &indexMaps);

  /// The cells, ascending by first position; cells that refinement added are at the end.
  const std::vector<IndexMap> &cells() const { return cells_; }
  /// The cells of an interned source index map.
  llvm::ArrayRef<unsigned> of(unsigned number) const { return of_.at(number); }
  /// Whether every source index map is one cell.
  bool whole() const { return whole_; }
  /// The cells that an interned target index map intersects, ascending.
  llvm::ArrayRef<unsigned> intersecting(unsigned number);
  /// Whether more than kMaxPairs pairs of sets had to be compared. Then the comparison was stopped, and the results
  /// are incomplete.
  bool tooMany() const { return pairs_ > kMaxPairs; }

private:
  static constexpr int64_t kMaxPairs = 1 << 24;

  void refine(unsigned number, std::vector<size_t> &active);

  const Interner<IndexMap> &indexMaps_;
  std::vector<IndexMap> cells_;
  std::vector<Bounds> limits_;                // by cell
  std::vector<std::vector<unsigned>> owners_; // the index maps that contain each cell, while cells are refined
  std::unordered_map<unsigned, llvm::SmallVector<unsigned, 1>> of_, intersecting_;
  std::optional<BlockIndex> index_;
  bool whole_ = true;
  int64_t pairs_ = 0;
};

// CommonRefinement adds the index maps one by one, in the order of their begins: a cell that a map covers in part is
// split in two. If no two maps overlap, an index over their blocks finds the cells.

std::optional<BlockIndex> BlockIndex::of(const std::vector<const IndexMap *> &sets) {
  int64_t count = 0;
  for (const IndexMap *set : sets)
    if (count += runCount(*set); count > kMaxBlocks)
      return std::nullopt;
  BlockIndex index;
  index.blocks_.reserve(static_cast<size_t>(count));
  for (unsigned k = 0; k < sets.size(); ++k)
    for (const IndexBlock &s : *sets[k])
      for (int64_t i = 0; i < s.count; ++i)
        index.blocks_.push_back({s.from + i * s.fromStep, s.from + i * s.fromStep + s.length, k});
  std::sort(index.blocks_.begin(), index.blocks_.end(),
            [](const Block &a, const Block &b) { return a.begin < b.begin; });
  for (size_t i = 1; i < index.blocks_.size(); ++i)
    if (index.blocks_[i].begin < index.blocks_[i - 1].end)
      return std::nullopt;
  return index;
}

std::optional<llvm::SmallVector<unsigned, 1>> BlockIndex::intersecting(const IndexMap &indexMap) const {
  if (runCount(indexMap) > static_cast<int64_t>(blocks_.size()))
    return std::nullopt;
  llvm::SmallVector<unsigned, 1> result;
  for (const IndexBlock &s : indexMap)
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t begin = s.from + i * s.fromStep, end = begin + s.length;
      auto at = std::upper_bound(blocks_.begin(), blocks_.end(), begin,
                                 [](int64_t position, const Block &block) { return position < block.end; });
      for (; at != blocks_.end() && at->begin < end; ++at)
        result.push_back(at->set);
    }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

CommonRefinement::CommonRefinement(const std::vector<unsigned> &numbers, const Interner<IndexMap> &indexMaps)
    : indexMaps_(indexMaps) {
  std::vector<std::tuple<int64_t, int64_t, unsigned>> order; // by begin and end
  order.reserve(numbers.size());
  for (unsigned number : numbers)
    order.emplace_back(bounds(indexMaps[number]).begin, bounds(indexMaps[number]).end, number);
  std::sort(order.begin(), order.end());
  std::vector<const IndexMap *> sets;
  sets.reserve(order.size());
  for (const auto &[begin, end, number] : order)
    sets.push_back(&indexMaps[number]);
  if (sets.size() > kFewSets)
    index_ = BlockIndex::of(sets);
  of_.reserve(order.size());
  if (index_) {
    limits_.reserve(order.size());
    cells_.reserve(order.size());
    for (const auto &[begin, end, number] : order) {
      of_[number] = {static_cast<unsigned>(cells_.size())};
      limits_.push_back({begin, end});
      cells_.push_back(indexMaps[number]);
    }
    return;
  }
  // Cells that end after the begin of this index map; the begins ascend, so a cell that ends before is never needed
  // again. Ascending.
  std::vector<size_t> active;
  for (const auto &[begin, end, number] : order) {
    std::erase_if(active, [&, from = begin](size_t k) { return limits_[k].end <= from; });
    refine(number, active);
    if (tooMany())
      return;
  }
  owners_.clear();
  for (const auto &[number, list] : of_)
    whole_ = whole_ && list.size() == 1;
  if (cells_.size() > kFewSets) {
    sets.clear();
    for (const IndexMap &set : cells_)
      sets.push_back(&set);
    index_ = BlockIndex::of(sets);
  }
}

void CommonRefinement::refine(unsigned number, std::vector<size_t> &active) {
  const Bounds mine = bounds(indexMaps_[number]);
  IndexMap rest = indexMaps_[number];
  auto &own = of_[number];
  auto add = [&](IndexMap set, std::vector<unsigned> owners) {
    active.push_back(cells_.size());
    limits_.push_back(bounds(set));
    cells_.push_back(std::move(set));
    owners_.push_back(std::move(owners));
  };
  for (size_t i = 0; i < active.size() && !rest.empty(); ++i) {
    const size_t k = active[i];
    if (limits_[k].end <= mine.begin || limits_[k].begin >= mine.end)
      continue;
    if (++pairs_; tooMany())
      return;
    const bool same = sameFrom(cells_[k], rest);
    if (!same && disjointFrom(cells_[k], rest))
      continue;
    // If they overlap in part, split the cell into the common positions and the others. Every index map that contains
    // the cell then contains both.
    if (IndexMap other = same ? IndexMap{} : difference(cells_[k], rest); !other.empty()) {
      IndexMap common = restrict(rest, cells_[k]);
      rest = difference(rest, cells_[k]);
      limits_[k] = bounds(common);
      cells_[k] = std::move(common);
      for (unsigned owner : owners_[k])
        of_[owner].push_back(static_cast<unsigned>(cells_.size()));
      add(std::move(other), owners_[k]);
    } else {
      rest = same ? IndexMap{} : difference(rest, cells_[k]);
    }
    own.push_back(static_cast<unsigned>(k));
    owners_[k].push_back(number);
  }
  if (!rest.empty()) {
    own.push_back(static_cast<unsigned>(cells_.size()));
    add(std::move(rest), {number});
  }
}

llvm::ArrayRef<unsigned> CommonRefinement::intersecting(unsigned number) {
  auto [at, added] = intersecting_.try_emplace(number);
  if (!added)
    return at->second;
  const IndexMap &indexMap = indexMaps_[number];
  if (auto found = index_ ? index_->intersecting(indexMap) : std::nullopt) {
    at->second = std::move(*found);
    return at->second;
  }
  const Bounds mine = bounds(indexMap);
  for (unsigned k = 0; k < cells_.size() && !tooMany(); ++k)
    if (limits_[k].begin < mine.end && mine.begin < limits_[k].end && ++pairs_ > 0 &&
        !disjointFrom(cells_[k], indexMap))
      at->second.push_back(k);
  return at->second;
}

/// Calls visit(tuple) for each combination of one entry from every list; the entry of the last list changes fastest.
template <class Visit> void forProduct(const std::vector<llvm::ArrayRef<unsigned>> &lists, Visit visit) {
  std::vector<unsigned> tuple(lists.size());
  std::vector<size_t> at(lists.size());
  for (const auto &list : lists)
    if (list.empty())
      return;
  while (true) {
    for (size_t d = 0; d < lists.size(); ++d)
      tuple[d] = lists[d][at[d]];
    visit(tuple);
    size_t d = lists.size();
    while (d > 0 && ++at[d - 1] == lists[d - 1].size())
      at[--d] = 0;
    if (d == 0)
      return;
  }
}

/// A product of index maps, one for each dimension, and the rank classes that hold it.
struct SourceBox {
  IndexMapNumbers indexMaps; // interned, by dimension
  std::vector<unsigned> rankClasses;
  Bounds along{0, 0}; // along dimension PatternSource::sweep
};

/// The elements of one tensor pattern that the source holds: rank classes by products of cells, or as disjoint boxes.
struct PatternSource {
  std::vector<PositionClass> rankClasses;
  std::vector<SourceBox> boxes;                // ordered by where they begin along `sweep`; empty: use `dimensions`
  size_t sweep = 0;                            // the dimension along which boxes are ordered
  std::vector<CommonRefinement *> dimensions;  // shared between patterns whose dimensions are cut in the same way
  Interner<std::vector<unsigned>> products;    // cells, one for each dimension
  std::vector<std::vector<unsigned>> replicas; // rank classes, by product
};

class OverlapFinder {
public:
  explicit OverlapFinder(Module &module)
      : module_(module), layout_(module.layout), copies_(module.layout),
        sourceClasses_(layout_.endpoints[0], copies_.source(), indexMaps_),
        tensorPatterns_(layout_.tensorPatterns.size()) {}

  llvm::Error run() {
    if (llvm::Error error = readSource())
      return error;
    for (unsigned e = 1; e < layout_.endpoints.size(); ++e) {
      PositionClasses rankClasses(layout_.endpoints[e], copies_.of(e), indexMaps_);
      for (unsigned p = 0; p < layout_.endpoints[e].params.size(); ++p) {
        const Param &param = layout_.endpoints[e].params[p];
        for (unsigned q = 0; q < param.parts.size(); ++q)
          for (const PositionClass &rankClass : rankClasses.of(p, q))
            if (llvm::Error error = overlap(e, rankClass, param.parts[q].pattern))
              return error;
      }
    }
    module_.transfers.relations = std::move(relations_).take();
    module_.level = Level::transfer;
    return llvm::Error::success();
  }

private:
  llvm::Error readSource() {
    const Endpoint &source = layout_.endpoints[0];
    for (unsigned p = 0; p < source.params.size(); ++p)
      for (unsigned q = 0; q < source.params[p].parts.size(); ++q)
        if (const int pattern = source.params[p].parts[q].pattern; pattern >= 0)
          for (PositionClass &rankClass : sourceClasses_.of(p, q)) {
            llvm::erase_if(rankClass.meshRanks, [&](int32_t meshRank) { return !mayRead(source, meshRank); });
            if (!rankClass.meshRanks.empty())
              tensorPatterns_[pattern].rankClasses.push_back(std::move(rankClass));
          }
    for (unsigned f = 0; f < tensorPatterns_.size(); ++f) {
      PatternSource &pattern = tensorPatterns_[f];
      if (readBoxes(pattern))
        continue;
      for (size_t d = 0; d < layout_.tensorPatterns[f].rank(); ++d) {
        std::vector<unsigned> shardings;
        shardings.reserve(pattern.rankClasses.size());
        for (const PositionClass &rankClass : pattern.rankClasses)
          shardings.push_back(rankClass.indexMaps[d]);
        std::sort(shardings.begin(), shardings.end());
        shardings.erase(std::unique(shardings.begin(), shardings.end()), shardings.end());
        auto at = refinements_.find(shardings);
        if (at == refinements_.end())
          at = refinements_.try_emplace(shardings, shardings, indexMaps_).first;
        if (at->second.tooMany())
          return tooMany(f);
        pattern.dimensions.push_back(&at->second);
      }
      for (unsigned v = 0; v < pattern.rankClasses.size(); ++v) {
        std::vector<llvm::ArrayRef<unsigned>> lists;
        lists.reserve(pattern.dimensions.size());
        for (size_t d = 0; d < pattern.dimensions.size(); ++d)
          lists.push_back(pattern.dimensions[d]->of(pattern.rankClasses[v].indexMaps[d]));
        forProduct(lists, [&](const std::vector<unsigned> &cells) {
          const unsigned product = pattern.products.intern(cells);
          if (product == pattern.replicas.size())
            pattern.replicas.emplace_back();
          pattern.replicas[product].push_back(v);
        });
      }
    }
    return llvm::Error::success();
  }

  llvm::Error tooMany(unsigned pattern) const {
    return llvm::createStringError("tensor '" + layout_.tensorPatterns[pattern].name +
                                   "' has interleaved or overlapping shards, more than 2^24 pairs of which would have "
                                   "to be compared; use longer blocks or fewer ranks");
  }

  /// Fills pattern.boxes if its rank classes hold boxes that are pairwise equal or disjoint but not a product of cuts
  /// of each dimension; returns whether they do.
  bool readBoxes(PatternSource &pattern) {
    if (cutsAtMostOneDimension(pattern.rankClasses))
      return false;
    std::unordered_map<IndexMapNumbers, size_t, ValueHash> known;
    for (unsigned v = 0; v < pattern.rankClasses.size(); ++v) {
      const auto [at, added] = known.try_emplace(pattern.rankClasses[v].indexMaps, pattern.boxes.size());
      if (added)
        pattern.boxes.push_back({pattern.rankClasses[v].indexMaps, {}, {}});
      pattern.boxes[at->second].rankClasses.push_back(v);
    }
    if (!separate(pattern))
      pattern.boxes.clear();
    return !pattern.boxes.empty();
  }

  /// Whether at most one dimension is sharded. Then the rank classes are a product of cuts.
  static bool cutsAtMostOneDimension(const std::vector<PositionClass> &rankClasses) {
    size_t cut = 0;
    for (size_t d = 0; !rankClasses.empty() && d < rankClasses[0].indexMaps.size(); ++d)
      cut += std::any_of(rankClasses.begin(), rankClasses.end(), [&](const PositionClass &rankClass) {
        return rankClass.indexMaps[d] != rankClasses[0].indexMaps[d];
      });
    return cut <= 1;
  }

  /// Sorts the boxes; returns whether they are pairwise disjoint and not a product of cuts.
  bool separate(PatternSource &pattern) {
    std::vector<SourceBox> &boxes = pattern.boxes;
    if (boxes.empty())
      return false;
    size_t product = 1, most = 0; // products of cuts are solved faster by cells
    for (size_t d = 0; d < boxes[0].indexMaps.size(); ++d) {
      std::vector<unsigned> distinct;
      distinct.reserve(boxes.size());
      for (const SourceBox &box : boxes)
        distinct.push_back(box.indexMaps[d]);
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      product = std::min(product * distinct.size(), boxes.size() + 1);
      if (distinct.size() > most) {
        most = distinct.size();
        pattern.sweep = d;
      }
    }
    if (product <= boxes.size())
      return false;
    for (SourceBox &box : boxes)
      box.along = bounds(indexMaps_[box.indexMaps[pattern.sweep]]);
    std::sort(boxes.begin(), boxes.end(), [](const SourceBox &a, const SourceBox &b) {
      return std::tie(a.along.begin, a.along.end, a.indexMaps) < std::tie(b.along.begin, b.along.end, b.indexMaps);
    });
    constexpr int64_t kMaxPairs = 1 << 22;
    int64_t pairs = 0;
    for (size_t i = 0; i < boxes.size(); ++i)
      for (size_t j = i + 1; j < boxes.size() && boxes[j].along.begin < boxes[i].along.end; ++j)
        if (++pairs > kMaxPairs || intersects(boxes[i].indexMaps, boxes[j].indexMaps))
          return false;
    return true;
  }

  bool intersects(const IndexMapNumbers &a, const IndexMapNumbers &b) {
    for (size_t d = 0; d < a.size(); ++d)
      if (a[d] != b[d] && disjointFrom(indexMaps_[a[d]], indexMaps_[b[d]]))
        return false;
    return true;
  }

  /// The interned relation source local -> target local within one cell.
  unsigned relation(const CommonRefinement &refinement, unsigned source, unsigned cell, unsigned target) {
    if (refinement.whole())
      return relation(source, target);
    const unsigned number = solved_.intern({source, target, reinterpret_cast<intptr_t>(&refinement), cell});
    if (number == solutions_.size())
      solutions_.push_back(relations_.intern(
          compose(inverse(restrict(indexMaps_[source], refinement.cells()[cell])), indexMaps_[target])));
    return solutions_[number];
  }

  /// The same for all positions that both sides hold.
  unsigned relation(unsigned source, unsigned target) {
    const unsigned number = solved_.intern({source, target, -1, -1});
    if (number == solutions_.size())
      solutions_.push_back(relations_.intern(compose(inverse(indexMaps_[source]), indexMaps_[target])));
    return solutions_[number];
  }

  /// Adds the overlaps of a part of the target on the mesh ranks of a class.
  llvm::Error overlap(unsigned endpoint, const PositionClass &rankClass, int patternNumber) {
    Overlap like;
    like.pattern = patternNumber;
    like.endpoint = endpoint;
    like.param = rankClass.param;
    like.part = rankClass.part;
    like.targets = rankClass.meshRanks;
    if (patternNumber < 0) {
      pad(std::move(like), rankClass);
      return llvm::Error::success();
    }
    const TensorPattern &pattern = layout_.tensorPatterns[patternNumber];
    int64_t wanted = 1;
    for (size_t d = 0; d < pattern.rank(); ++d)
      wanted *= positionCount(indexMaps_[rankClass.indexMaps[d]]);
    const bool boxes = !tensorPatterns_[patternNumber].boxes.empty();
    llvm::Expected<int64_t> found = boxes ? overlapBoxes(rankClass, like) : overlapCells(rankClass, like);
    if (!found)
      return found.takeError();
    if (replicaGroups_ > kMaxReplicaGroups)
      return llvm::createStringError(
          "tensor '" + pattern.name +
          "' is held by so many params on both sides that more than 2^22 pairs of a source and a target param "
          "overlap; expected at most 2^22: use fewer params or fewer ranks");
    if (*found == wanted)
      return llvm::Error::success();
    const Endpoint &target = layout_.endpoints[endpoint];
    return llvm::createStringError(
        target.role + " param '" + target.params[rankClass.param].name + "' (" + target.params[rankClass.param].origin +
        ") needs " + std::to_string(wanted) + " elements of tensor '" + pattern.name + "' on mesh rank " +
        std::to_string(rankClass.meshRanks[0]) + ", but the source holds only " + std::to_string(*found) + " of them");
  }

  /// Adds an overlap for each box of the source that the target part intersects. `like`: an overlap without replica
  /// groups. Returns the number of elements.
  int64_t overlapBoxes(const PositionClass &rankClass, const Overlap &like) {
    const PatternSource &source = tensorPatterns_[like.pattern];
    const size_t rank = layout_.tensorPatterns[like.pattern].rank();
    int64_t found = 0;
    const Bounds along = bounds(indexMaps_[rankClass.indexMaps[source.sweep]]);
    for (const SourceBox &box : source.boxes) {
      if (box.along.begin >= along.end)
        break;
      if (box.along.end <= along.begin)
        continue;
      IndexMapNumbers relations;
      for (size_t d = 0; d < rank; ++d) {
        relations.push_back(relation(box.indexMaps[d], rankClass.indexMaps[d]));
        if (relations_[relations.back()].empty())
          break;
      }
      if (relations_[relations.back()].empty())
        continue;
      Overlap overlap = like;
      for (unsigned v : box.rankClasses)
        overlap.replicaGroups.push_back(
            {source.rankClasses[v].param, source.rankClasses[v].part, source.rankClasses[v].meshRanks, relations});
      found += add(std::move(overlap));
    }
    return found;
  }

  /// The same for each combination of the source's cells that the target part intersects.
  llvm::Expected<int64_t> overlapCells(const PositionClass &rankClass, const Overlap &like) {
    PatternSource &source = tensorPatterns_[like.pattern];
    const size_t rank = layout_.tensorPatterns[like.pattern].rank();
    std::vector<llvm::ArrayRef<unsigned>> lists;
    for (size_t d = 0; d < rank; ++d) {
      lists.push_back(source.dimensions[d]->intersecting(rankClass.indexMaps[d]));
      if (source.dimensions[d]->tooMany())
        return tooMany(static_cast<unsigned>(like.pattern));
    }
    int64_t found = 0;
    forProduct(lists, [&](const std::vector<unsigned> &cells) {
      const auto product = source.products.find(cells);
      if (!product)
        return;
      Overlap overlap = like;
      for (unsigned v : source.replicas[*product]) {
        const PositionClass &from = source.rankClasses[v];
        ReplicaGroup replicaGroup{from.param, from.part, from.meshRanks, {}};
        for (size_t d = 0; d < rank; ++d)
          replicaGroup.relations.push_back(
              relation(*source.dimensions[d], from.indexMaps[d], cells[d], rankClass.indexMaps[d]));
        overlap.replicaGroups.push_back(std::move(replicaGroup));
      }
      found += add(std::move(overlap));
    });
    return found;
  }

  /// Adds an overlap of a tensor pattern. Returns the number of its elements.
  int64_t add(Overlap overlap) {
    const TensorPattern &pattern = layout_.tensorPatterns[overlap.pattern];
    measure(overlap, pattern.variables.size(), itemBytes(pattern.dtype));
    replicaGroups_ += static_cast<int64_t>(overlap.replicaGroups.size());
    const int64_t elements = overlap.tensors * (overlap.bytes / itemBytes(pattern.dtype));
    module_.transfers.overlaps.push_back(std::move(overlap));
    return elements;
  }

  /// Padding needs no source: its overlap has the mesh rank -1 as its only replica.
  void pad(Overlap overlap, const PositionClass &rankClass) {
    ReplicaGroup replicaGroup{0, 0, {-1}, {}};
    for (unsigned sharding : rankClass.indexMaps) {
      IndexMap local = inverse(indexMaps_[sharding]);
      for (IndexBlock &s : local) {
        s.to = s.from;
        s.toStep = s.fromStep;
      }
      replicaGroup.relations.push_back(relations_.intern(normalize(std::move(local))));
    }
    overlap.replicaGroups = {std::move(replicaGroup)};
    const Param &param = layout_.endpoints[overlap.endpoint].params[overlap.param];
    measure(overlap, param.variables.size(), itemBytes(param.dtype));
    module_.transfers.overlaps.push_back(std::move(overlap));
  }

  void measure(Overlap &overlap, size_t variables, int64_t item) {
    overlap.tensors = 1;
    overlap.bytes = item;
    const IndexMapNumbers &relations = overlap.replicaGroups[0].relations;
    for (size_t d = 0; d < relations.size(); ++d)
      (d < variables ? overlap.tensors : overlap.bytes) *= positionCount(relations_[relations[d]]);
  }

  static constexpr int64_t kMaxReplicaGroups = 1 << 22;

  Module &module_;
  const Layout &layout_;
  const Copies copies_;
  int64_t replicaGroups_ = 0; // how many all overlaps so far have
  Interner<IndexMap> indexMaps_, relations_;
  PositionClasses sourceClasses_;
  std::vector<PatternSource> tensorPatterns_;
  std::map<std::vector<unsigned>, CommonRefinement> refinements_;
  Interner<std::array<int64_t, 4>> solved_; // source, target, refinement, cell
  std::vector<unsigned> solutions_;         // by number of `solved_`: the relation
};

} // namespace

llvm::Error findOverlaps(Module &module) { return OverlapFinder(module).run(); }

} // namespace reshard
