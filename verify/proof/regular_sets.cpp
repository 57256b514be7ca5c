// SPDX-License-Identifier: Apache-2.0
// Searches regular sets, and splits loop nests at their borders, with repeated fragments as one.
#include "verify/proof/regular_sets.h"

#include <algorithm>
#include <cstdlib>

namespace reshard::verify {

namespace {

bool digitsOf(const RegularSet &set, int64_t position, Digits &digits) {
  int64_t rest = position - set.begin;
  if (rest < 0 || position >= set.end)
    return false;
  for (size_t i = 0; i < set.dimensions.size(); ++i) {
    const RegularSet::Dimension &dimension = set.dimensions[i];
    digits[i] = rest / dimension.step;
    if (digits[i] >= dimension.count)
      return false;
    rest -= digits[i] * dimension.step;
  }
  return rest == 0;
}

} // namespace

bool RegularSets::add(RegularSet set) {
  std::vector<RegularSet::Dimension> &dimensions = set.dimensions;
  std::erase_if(dimensions, [](const RegularSet::Dimension &d) { return d.count == 1; });
  for (RegularSet::Dimension &d : dimensions)
    if (d.step < 0) {
      set.begin += (d.count - 1) * d.step;
      set.value += (d.count - 1) * d.value;
      d.step = -d.step;
      d.value = -d.value;
    }
  std::stable_sort(dimensions.begin(), dimensions.end(), [](const auto &a, const auto &b) { return a.step > b.step; });
  for (size_t i = dimensions.size(); i-- > 1;) {
    RegularSet::Dimension &outer = dimensions[i - 1];
    const RegularSet::Dimension &inner = dimensions[i];
    if (outer.step != inner.count * inner.step || outer.value != inner.count * inner.value)
      continue;
    outer = {outer.count * inner.count, inner.step, inner.value};
    dimensions.erase(dimensions.begin() + static_cast<std::ptrdiff_t>(i));
  }
  // If the step of a dimension is shorter than the extent of the inner dimensions, positions have no unique digits:
  // replace that dimension by one set for each of its values.
  int64_t reach = 1;
  size_t crossing = dimensions.size() > kMaxSetDimensions ? 0 : dimensions.size();
  for (size_t i = dimensions.size(); i-- > 0; reach += (dimensions[i].count - 1) * dimensions[i].step)
    if (dimensions[i].step < reach)
      crossing = i;
  if (crossing < dimensions.size()) {
    const RegularSet::Dimension crossed = dimensions[crossing];
    if (list_.size() >= kMaxSets || crossed.count > static_cast<int64_t>(kMaxSets - list_.size()))
      return false;
    dimensions.erase(dimensions.begin() + static_cast<std::ptrdiff_t>(crossing));
    for (int64_t i = 0; i < crossed.count; ++i) {
      RegularSet one = set;
      one.begin += i * crossed.step;
      one.value += i * crossed.value;
      if (!add(std::move(one)))
        return false;
    }
    return true;
  }
  if (list_.size() >= kMaxSets)
    return false;
  set.end = set.begin + reach;
  int64_t positions = 1;
  for (const RegularSet::Dimension &d : dimensions)
    positions *= d.count;
  if (__builtin_add_overflow(positions_, positions, &positions_))
    positions_ = INT64_MAX;
  list_.push_back(std::move(set));
  return true;
}

void RegularSets::finish() {
  std::sort(list_.begin(), list_.end(), [](const RegularSet &a, const RegularSet &b) { return a.begin < b.begin; });
  maxEnds_.resize(list_.size());
  const auto fill = [&](auto &self, size_t first, size_t last) -> int64_t {
    if (first == last)
      return INT64_MIN;
    const size_t middle = first + (last - first) / 2;
    return maxEnds_[middle] = std::max({list_[middle].end, self(self, first, middle), self(self, middle + 1, last)});
  };
  fill(fill, 0, list_.size());
}

const RegularSet *RegularSets::search(size_t first, size_t last, int64_t position, Digits &digits,
                                      uint64_t &work) const {
  if (first == last)
    return nullptr;
  ++work;
  const size_t middle = first + (last - first) / 2;
  if (maxEnds_[middle] <= position)
    return nullptr;
  if (list_[middle].begin <= position) {
    if (const RegularSet *later = search(middle + 1, last, position, digits, work))
      return later;
    if (digitsOf(list_[middle], position, digits))
      return &list_[middle];
  }
  return search(first, middle, position, digits, work);
}

const RegularSet *RegularSets::find(int64_t position, Digits &digits, size_t &hint, uint64_t &work) const {
  for (size_t i = hint; i < std::min(hint + 2, list_.size()); ++i, ++work)
    if (digitsOf(list_[i], position, digits)) {
      hint = i;
      return &list_[i];
    }
  const RegularSet *found = search(0, list_.size(), position, digits, work);
  if (found)
    hint = static_cast<size_t>(found - list_.data());
  return found;
}

bool RegularSets::partition(int64_t count, uint64_t &work) const {
  return positions_ == count &&
         (count == 0 || NestSplitter(*this, work).run({0, 0, 0, {{count, 1, 0, 0}}}, [](const Fragment &) {
           return true;
         }) == SplitStatus::done);
}

SplitStatus NestSplitter::run(const LoopNest &nest, const std::function<bool(const Fragment &)> &visit) {
  fragments_.clear();
  full_ = false;
  const SplitStatus result = split(nest.loops, {nest.position, nest.counterpart, nest.origin});
  if (!full_) {
    for (const Fragment &fragment : fragments_)
      if (!visit(fragment))
        return SplitStatus::stopped;
    return result;
  }
  // Too many fragments to keep: do one half first. Each half is split again, which at most doubles the work.
  const auto longest = std::max_element(nest.loops.begin(), nest.loops.end(),
                                        [](const auto &a, const auto &b) { return a.count < b.count; });
  LoopNest half = nest;
  LoopNest::Loop &loop = half.loops[static_cast<size_t>(longest - nest.loops.begin())];
  loop.count = longest->count / 2;
  if (const SplitStatus first = run(half, visit); first != SplitStatus::done)
    return first;
  half.position += loop.count * loop.position;
  half.counterpart += loop.count * loop.counterpart;
  half.origin += loop.count * loop.origin;
  loop.count = longest->count - loop.count;
  return run(half, visit);
}

/// How many times, up to `most`, a fragment can be repeated in its set, each time `step` positions further. `change`:
/// the change of its digits from one repetition to the next.
int64_t NestSplitter::repeat(const Fragment &fragment, int64_t step, int64_t most, Digits &change) {
  ++work_;
  if (!digitsOf(*fragment.set, fragment.position + step, change))
    return 1;
  Digits first;
  digitsOf(*fragment.set, fragment.position, first);
  for (size_t i = 0; i < fragment.set->dimensions.size(); ++i) {
    change[i] -= first[i];
    if (change[i] > 0)
      most = std::min(most, 1 + (fragment.set->dimensions[i].count - 1 - fragment.high[i]) / change[i]);
    else if (change[i] < 0)
      most = std::min(most, 1 + fragment.low[i] / -change[i]);
  }
  return most;
}

SplitStatus NestSplitter::split(std::span<const LoopNest::Loop> loops, const Start &start) {
  return loops.empty() ? addElement(start) : split(loops[0], loops.subspan(1), start);
}

SplitStatus NestSplitter::addElement(const Start &start) {
  if (work_ > kMaxWork)
    return SplitStatus::fragmented;
  if (fragments_.size() >= kMaxFragments) {
    full_ = true;
    return SplitStatus::stopped;
  }
  Fragment fragment;
  fragment.set = sets_.find(start.position, fragment.low, hint_, work_);
  if (!fragment.set) {
    position_ = start.position;
    origin_ = start.origin;
    return SplitStatus::missing;
  }
  fragment.high = fragment.low;
  fragment.position = start.position;
  fragment.counterpart = start.counterpart;
  fragment.origin = start.origin;
  fragment.value = fragment.set->value;
  for (size_t i = 0; i < fragment.set->dimensions.size(); ++i)
    fragment.value += fragment.low[i] * fragment.set->dimensions[i].value;
  fragments_.push_back(std::move(fragment));
  return SplitStatus::done;
}

/// How many iterations of a loop, of which `left` are left at a position, make one step of the set there; 1 if no
/// number of them does.
int64_t NestSplitter::iterationsOfStep(const LoopNest::Loop &loop, int64_t position, int64_t left) {
  if (left <= 1 || loop.position == 0)
    return 1;
  Digits digits;
  const RegularSet *set = sets_.find(position, digits, hint_, work_);
  const int64_t length = std::abs(loop.position);
  for (size_t d = 0; set && d < set->dimensions.size(); ++d) {
    const RegularSet::Dimension &dimension = set->dimensions[d];
    const bool continues = loop.position > 0 ? digits[d] + 1 < dimension.count : digits[d] > 0;
    if (continues && dimension.step > length && dimension.step % length == 0 && dimension.step / length < left)
      return dimension.step / length;
  }
  return 1;
}

/// Repeats the fragments from `begin` on `times` times, each time one `step` further.
void NestSplitter::repeatFragments(size_t begin, const LoopNest::Loop &step, int64_t times) {
  Digits change;
  for (size_t p = begin; p < fragments_.size(); ++p) {
    Fragment &fragment = fragments_[p];
    repeat(fragment, step.position, times, change);
    int64_t value = 0;
    for (size_t d = 0; d < fragment.set->dimensions.size(); ++d) {
      value += change[d] * fragment.set->dimensions[d].value;
      (change[d] > 0 ? fragment.high : fragment.low)[d] += (times - 1) * change[d];
    }
    fragment.loops.push_back({times, step.counterpart, step.origin, value});
  }
}

/// Splits the nest of `first` around `inner`. One iteration, or as many iterations as make one step of a set, is split
/// once; its fragments are then repeated as long as they stay in their sets.
SplitStatus NestSplitter::split(const LoopNest::Loop &first, std::span<const LoopNest::Loop> inner,
                                const Start &start) {
  for (int64_t i = 0; i < first.count;) {
    const Start at{start.position + i * first.position, start.counterpart + i * first.counterpart,
                   start.origin + i * first.origin};
    const int64_t left = first.count - i, together = iterationsOfStep(first, at.position, left);
    const size_t begin = fragments_.size();
    const SplitStatus status =
        together > 1 ? split({together, first.position, first.counterpart, first.origin}, inner, at) : split(inner, at);
    if (status != SplitStatus::done)
      return status;
    const LoopNest::Loop step{1, together * first.position, together * first.counterpart, together * first.origin};
    int64_t times = left / together;
    Digits change;
    for (size_t p = begin; p < fragments_.size() && times > 1; ++p)
      times = std::min(times, repeat(fragments_[p], step.position, times, change));
    if (times > 1)
      repeatFragments(begin, step, times);
    i += times * together;
  }
  return SplitStatus::done;
}

} // namespace reshard::verify
