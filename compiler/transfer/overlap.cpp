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
#include "compiler/transfer/common_refinement.h"
#include "compiler/transfer/rank_classes.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

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
