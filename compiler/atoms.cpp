#include "compiler/atoms.h"

#include <algorithm>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Below this comparing each with each is as quick as an index.
constexpr size_t kFewSets = 64;
constexpr int64_t kMostBlocks = 1 << 22;

int64_t blocks(const Segments &segments) {
  int64_t count = 0;
  for (const Segment &s : segments)
    count += s.count;
  return count;
}

} // namespace

Bounds bounds(const Segments &segments) {
  Bounds result{INT64_MAX, INT64_MIN};
  for (const Segment &s : segments) {
    result.begin = std::min(result.begin, s.from);
    result.end = std::max(result.end, s.from + (s.count - 1) * s.fromStep + s.length);
  }
  return result;
}

std::optional<BlockIndex> BlockIndex::of(const std::vector<const Segments *> &sets) {
  int64_t count = 0;
  for (const Segments *set : sets)
    if (count += blocks(*set); count > kMostBlocks)
      return std::nullopt;
  BlockIndex index;
  index.blocks_.reserve(static_cast<size_t>(count));
  for (unsigned k = 0; k < sets.size(); ++k)
    for (const Segment &s : *sets[k])
      for (int64_t i = 0; i < s.count; ++i)
        index.blocks_.push_back({s.from + i * s.fromStep, s.from + i * s.fromStep + s.length, k});
  std::sort(index.blocks_.begin(), index.blocks_.end(),
            [](const Block &a, const Block &b) { return a.begin < b.begin; });
  for (size_t i = 1; i < index.blocks_.size(); ++i)
    if (index.blocks_[i].begin < index.blocks_[i - 1].end)
      return std::nullopt;
  return index;
}

std::optional<llvm::SmallVector<unsigned, 1>> BlockIndex::meeting(const Segments &share) const {
  if (blocks(share) > static_cast<int64_t>(blocks_.size()))
    return std::nullopt;
  llvm::SmallVector<unsigned, 1> result;
  for (const Segment &s : share)
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

Atoms::Atoms(std::vector<unsigned> shares, const Interner<Segments> &segments) : segments_(segments) {
  std::vector<std::tuple<int64_t, int64_t, unsigned>> order; // by begin and end
  for (unsigned share : shares)
    order.emplace_back(bounds(segments[share]).begin, bounds(segments[share]).end, share);
  std::sort(order.begin(), order.end());
  std::vector<const Segments *> sets;
  for (const auto &[begin, end, share] : order)
    sets.push_back(&segments[share]);
  if (sets.size() > kFewSets)
    index_ = BlockIndex::of(sets);
  of_.reserve(order.size());
  if (index_) {
    limits_.reserve(order.size());
    sets_.reserve(order.size());
    for (const auto &[begin, end, share] : order) {
      of_[share] = {static_cast<unsigned>(sets_.size())};
      limits_.push_back({begin, end});
      sets_.push_back(segments[share]);
    }
    return;
  }
  std::vector<size_t> active; // atoms that end behind where this share, and so each that follows, begins; ascending
  for (const auto &[begin, end, share] : order) {
    std::erase_if(active, [&, from = begin](size_t k) { return limits_[k].end <= from; });
    refine(share, active);
    if (tooMany())
      return;
  }
  shares_.clear();
  for (const auto &[share, list] : of_)
    whole_ = whole_ && list.size() == 1;
  if (sets_.size() > kFewSets) {
    sets.clear();
    for (const Segments &set : sets_)
      sets.push_back(&set);
    index_ = BlockIndex::of(sets);
  }
}

void Atoms::refine(unsigned share, std::vector<size_t> &active) {
  const Bounds mine = bounds(segments_[share]);
  Segments rest = segments_[share];
  auto &own = of_[share];
  auto add = [&](Segments set, std::vector<unsigned> shares) {
    active.push_back(sets_.size());
    limits_.push_back(bounds(set));
    sets_.push_back(std::move(set));
    shares_.push_back(std::move(shares));
  };
  for (size_t i = 0; i < active.size() && !rest.empty(); ++i) {
    const size_t k = active[i];
    if (limits_[k].end <= mine.begin || limits_[k].begin >= mine.end)
      continue;
    if (++pairs_; tooMany())
      return;
    const bool same = sameFrom(sets_[k], rest);
    if (!same && disjointFrom(sets_[k], rest))
      continue;
    // Where they overlap in part, the atom falls into what is shared and what is not; so does everything that holds it.
    if (Segments other = same ? Segments{} : difference(sets_[k], rest); !other.empty()) {
      Segments common = restrict(rest, sets_[k]);
      rest = difference(rest, sets_[k]);
      limits_[k] = bounds(common);
      sets_[k] = std::move(common);
      for (unsigned holder : shares_[k])
        of_[holder].push_back(static_cast<unsigned>(sets_.size()));
      add(std::move(other), shares_[k]);
    } else {
      rest = same ? Segments{} : difference(rest, sets_[k]);
    }
    own.push_back(static_cast<unsigned>(k));
    shares_[k].push_back(share);
  }
  if (!rest.empty()) {
    own.push_back(static_cast<unsigned>(sets_.size()));
    add(std::move(rest), {share});
  }
}

llvm::ArrayRef<unsigned> Atoms::meeting(unsigned share) {
  auto [at, added] = meeting_.try_emplace(share);
  if (!added)
    return at->second;
  const Segments &segments = segments_[share];
  if (auto found = index_ ? index_->meeting(segments) : std::nullopt) {
    at->second = std::move(*found);
    return at->second;
  }
  const Bounds mine = bounds(segments);
  for (unsigned k = 0; k < sets_.size() && !tooMany(); ++k)
    if (limits_[k].begin < mine.end && mine.begin < limits_[k].end && ++pairs_ > 0 && !disjointFrom(sets_[k], segments))
      at->second.push_back(k);
  return at->second;
}

} // namespace reshard
