// SPDX-License-Identifier: Apache-2.0
// Adds the index maps one by one, in the order of their begins: a cell that a map covers in part is split in two. If no
// two maps overlap, an index over their blocks finds the cells.
#include "compiler/transfer/common_refinement.h"

#include <algorithm>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// With at most this many sets, comparing each with each is as fast as an index.
constexpr size_t kFewSets = 64;
constexpr int64_t kMaxBlocks = 1 << 22;

} // namespace

Bounds bounds(const IndexMap &indexMap) {
  Bounds result{INT64_MAX, INT64_MIN};
  for (const IndexBlock &s : indexMap) {
    result.begin = std::min(result.begin, s.from);
    result.end = std::max(result.end, s.from + (s.count - 1) * s.fromStep + s.length);
  }
  return result;
}

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

} // namespace reshard
