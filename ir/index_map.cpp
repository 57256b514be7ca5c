// SPDX-License-Identifier: Apache-2.0
// Works on periodic blocks as they are: two blocks are composed over one common period, the LCM of their steps, and the
// result is folded into periodic blocks again.
#include "ir/index_map.h"

#include "llvm/ADT/STLExtras.h"

#include <algorithm>
#include <numeric>

namespace reshard::ir {
namespace {

/// One side of an index block: equal intervals at a constant distance. A single interval has step 0.
struct Intervals {
  int64_t start, length, count, step;
  int64_t end() const { return start + (count - 1) * step + length; }
};

Intervals toSide(const IndexBlock &s) { return {s.to, s.length, s.count, s.toStep}; }
Intervals fromSide(const IndexBlock &s) { return {s.from, s.length, s.count, s.fromStep}; }

/// Repetition i of an index block `a` and repetition j of an index block `b`, then `times` - 1 further pairs, each
/// `iStride` repetitions of `a` and `jStride` repetitions of `b` after the one before.
struct Repetitions {
  int64_t i = 0, j = 0, times = 1, iStride = 0, jStride = 0;
};

/// Appends the composition of the repetitions of `a` with the repetitions of `b`.
void emit(const IndexBlock &a, const IndexBlock &b, const Repetitions &each, IndexMap &result) {
  const int64_t aStart = a.to + each.i * a.toStep, bStart = b.from + each.j * b.fromStep;
  const int64_t begin = std::max(aStart, bStart), end = std::min(aStart + a.length, bStart + b.length);
  if (begin >= end || each.times <= 0)
    return;
  IndexBlock s;
  s.from = a.from + each.i * a.fromStep + (begin - aStart);
  s.to = b.to + each.j * b.toStep + (begin - bStart);
  s.length = end - begin;
  s.count = each.times;
  if (each.times > 1) {
    s.fromStep = each.iStride * a.fromStep;
    s.toStep = each.jStride * b.toStep;
  }
  result.push_back(s);
}

/// The range of intervals of `b` that overlap [begin, end), as if `b` had infinitely many in both directions.
std::pair<int64_t, int64_t> overlapping(const Intervals &b, int64_t begin, int64_t end) {
  if (b.step == 0)
    return {0, b.start < end && begin < b.start + b.length ? 1 : 0};
  return {ceilDivide(begin - b.start - b.length + 1, b.step), floorDivide(end - 1 - b.start, b.step) + 1};
}

/// Composes repetition i of `a` with all of `b` (`swapped`: all of `b` with repetition i of `a`). The repetitions of
/// `b` that lie inside give one periodic block, the clipped ones at the ends at most one more each.
void composeRepetition(const IndexBlock &a, const IndexBlock &b, int64_t i, bool swapped, IndexMap &result) {
  const Intervals intervals = swapped ? toSide(b) : fromSide(b);
  const int64_t begin = swapped ? a.from + i * a.fromStep : a.to + i * a.toStep, end = begin + a.length;
  auto [first, last] = overlapping(intervals, begin, end);
  first = std::max<int64_t>(first, 0);
  last = std::min(last, b.count);
  auto put = [&](int64_t j, int64_t times) {
    if (swapped)
      emit(b, a, {.i = j, .j = i, .times = times, .iStride = 1}, result);
    else
      emit(a, b, {.i = i, .j = j, .times = times, .jStride = 1}, result);
  };
  auto whole = [&](int64_t j) {
    const int64_t start = intervals.start + j * intervals.step;
    return start >= begin && start + intervals.length <= end;
  };
  int64_t firstWhole = first, lastWhole = last;
  while (firstWhole < last && !whole(firstWhole))
    put(firstWhole++, 1);
  while (lastWhole > firstWhole && !whole(lastWhole - 1))
    put(--lastWhole, 1);
  if (firstWhole >= lastWhole)
    return;
  const int64_t times = lastWhole - firstWhole;
  put(firstWhole, times);
  if (times > 1) { // emit() uses the step of `a`, but inside one of its repetitions the pairs have the step of `b`
    if (swapped)
      result.back().toStep = intervals.step;
    else
      result.back().fromStep = intervals.step;
  }
}

/// Composes one common period (the LCM of the steps). Each overlap in it is repeated until `a` or `b` ends.
void periodic(const IndexBlock &a, const IndexBlock &b, int64_t aPeriod, int64_t bPeriod, IndexMap &result) {
  const Intervals intervals = fromSide(b);
  for (int64_t i = 0, n = std::min(a.count, aPeriod); i < n; ++i) {
    const int64_t begin = a.to + i * a.toStep;
    const auto [first, last] = overlapping(intervals, begin, begin + a.length);
    for (int64_t j = first; j < last; ++j) {
      const int64_t t0 = std::max<int64_t>(0, ceilDivide(-j, bPeriod));
      const int64_t t1 = std::min(floorDivide(a.count - 1 - i, aPeriod), floorDivide(b.count - 1 - j, bPeriod));
      emit(a, b,
           {.i = i + t0 * aPeriod, .j = j + t0 * bPeriod, .times = t1 - t0 + 1, .iStride = aPeriod, .jStride = bPeriod},
           result);
    }
  }
}

void composePair(const IndexBlock &a, const IndexBlock &b, IndexMap &result) {
  if (a.count > 1 && b.count > 1) {
    const int64_t common = std::gcd(a.toStep, b.fromStep);
    const int64_t aPeriod = b.fromStep / common, bPeriod = a.toStep / common; // repetitions in one common period
    const int64_t perRepetition = a.length / b.fromStep + 2;
    const int64_t inPeriod = std::min(a.count, aPeriod);
    if (inPeriod <= 3 * std::min(a.count, b.count) / perRepetition)
      return periodic(a, b, aPeriod, bPeriod, result);
  }
  if (a.count <= b.count)
    for (int64_t i = 0; i < a.count; ++i)
      composeRepetition(a, b, i, false, result);
  else
    for (int64_t j = 0; j < b.count; ++j)
      composeRepetition(b, a, j, true, result);
}

/// Joins blocks that are adjacent on both sides and folds equal blocks at constant distances. `indexBlocks` is sorted
/// by `from`.
IndexMap fold(const IndexMap &indexBlocks) {
  IndexMap joined;
  for (IndexBlock s : indexBlocks) {
    if (s.count > 1 && s.fromStep == s.length && s.toStep == s.length)
      s = {s.from, s.to, s.length * s.count, 1, 0, 0};
    if (!joined.empty()) {
      IndexBlock &last = joined.back();
      if (last.count == s.count && last.fromStep == s.fromStep && last.toStep == s.toStep &&
          last.from + last.length == s.from && last.to + last.length == s.to) {
        last.length += s.length;
        if (last.count > 1 && last.fromStep == last.length && last.toStep == last.length)
          last = {last.from, last.to, last.length * last.count, 1, 0, 0};
        continue;
      }
    }
    joined.push_back(s);
  }
  IndexMap folded;
  for (const IndexBlock &s : joined) {
    if (!folded.empty() && s.count == 1 && folded.back().length == s.length) {
      IndexBlock &last = folded.back();
      if (last.count == 1) {
        last = {last.from, last.to, last.length, 2, s.from - last.from, s.to - last.to};
        continue;
      }
      if (last.from + last.count * last.fromStep == s.from && last.to + last.count * last.toStep == s.to) {
        ++last.count;
        continue;
      }
    }
    folded.push_back(s);
  }
  return folded;
}

IndexMap itself(const IndexMap &relation) {
  IndexMap result = relation;
  for (IndexBlock &s : result) {
    s.to = s.from;
    s.toStep = s.fromStep;
  }
  return result;
}

} // namespace

IndexMap identity(int64_t n) { return n > 0 ? IndexMap{{0, 0, n, 1, 0, 0}} : IndexMap{}; }

IndexMap inverse(const IndexMap &relation) {
  IndexMap result;
  result.reserve(relation.size());
  for (const IndexBlock &s : relation) {
    if (s.toStep >= 0) {
      result.push_back({s.to, s.from, s.length, s.count, s.toStep, s.fromStep});
    } else { // keep the steps of `from` positive: number the repetitions from the other end
      const int64_t last = s.count - 1;
      result.push_back({s.to + last * s.toStep, s.from + last * s.fromStep, s.length, s.count, -s.toStep, -s.fromStep});
    }
  }
  std::sort(result.begin(), result.end(), [](const IndexBlock &a, const IndexBlock &b) { return a.from < b.from; });
  return result;
}

IndexMap compose(const IndexMap &first, const IndexMap &second) {
  if (first.size() == 1 && second.size() == 1 && first[0].count == 1 && second[0].count == 1) { // the usual case
    IndexMap result;
    emit(first[0], second[0], {}, result);
    return result;
  }
  // `second` is sorted by start; with the furthest end up to each block, that bounds the partners of a block of
  // `first`.
  std::vector<int64_t> furthest;
  int64_t end = INT64_MIN;
  furthest.reserve(second.size());
  for (const IndexBlock &b : second) {
    end = std::max(end, fromSide(b).end());
    furthest.push_back(end);
  }
  IndexMap result;
  for (const IndexBlock &original : first) {
    IndexBlock a = original;
    if (a.toStep < 0) {
      const int64_t last = a.count - 1;
      a = {a.from + last * a.fromStep, a.to + last * a.toStep, a.length, a.count, -a.fromStep, -a.toStep};
    }
    const Intervals side = toSide(a);
    auto after = std::lower_bound(second.begin(), second.end(), side.end(),
                                  [](const IndexBlock &b, int64_t position) { return b.from < position; });
    for (size_t k = after - second.begin(); k > 0 && furthest[k - 1] > side.start; --k)
      composePair(a, second[k - 1], result);
  }
  return normalize(std::move(result));
}

IndexMap restrict(const IndexMap &relation, const IndexMap &set) { return compose(itself(set), relation); }

IndexMap normalize(IndexMap indexBlocks) {
  for (IndexBlock &s : indexBlocks) {
    if (s.count > 1 && s.fromStep < 0) {
      const int64_t last = s.count - 1;
      s = {s.from + last * s.fromStep, s.to + last * s.toStep, s.length, s.count, -s.fromStep, -s.toStep};
    }
    if (s.count == 1)
      s.fromStep = s.toStep = 0;
  }
  llvm::erase_if(indexBlocks, [](const IndexBlock &s) { return s.length <= 0 || s.count <= 0; });
  std::sort(indexBlocks.begin(), indexBlocks.end(),
            [](const IndexBlock &a, const IndexBlock &b) { return a.from < b.from; });
  return fold(indexBlocks);
}

IndexMap dense(const IndexMap &relation) {
  if (relation.size() == 1) {
    IndexBlock s = relation[0];
    s.to = 0;
    s.toStep = s.count > 1 ? s.length : 0;
    return normalize({s});
  }
  IndexMap result;
  int64_t next = 0;
  for (const auto &[from, to] : expand(relation)) {
    if (!result.empty() && result.back().from + result.back().length == from)
      ++result.back().length;
    else
      result.push_back({from, next, 1, 1, 0, 0});
    ++next;
  }
  return normalize(std::move(result));
}

IndexMap difference(const IndexMap &a, const IndexMap &b) {
  const IndexMap common = compose(itself(a), itself(b));
  if (common.empty())
    return itself(a);
  std::vector<std::pair<int64_t, int64_t>> taken; // begin and end of each repetition, sorted
  for (const IndexBlock &s : common)
    for (int64_t i = 0; i < s.count; ++i)
      taken.emplace_back(s.from + i * s.fromStep, s.from + i * s.fromStep + s.length);
  std::sort(taken.begin(), taken.end());
  IndexMap rest;
  for (const IndexBlock &s : a)
    for (int64_t i = 0; i < s.count; ++i) {
      int64_t begin = s.from + i * s.fromStep;
      const int64_t end = begin + s.length;
      auto next = std::lower_bound(taken.begin(), taken.end(), std::make_pair(begin, INT64_MIN));
      if (next != taken.begin()) // a joined block of `common` may start before this repetition of `a`
        begin = std::max(begin, std::prev(next)->second);
      for (; next != taken.end() && next->first < end; ++next) {
        if (begin < next->first)
          rest.push_back({begin, begin, next->first - begin, 1, 0, 0});
        begin = next->second;
      }
      if (begin < end)
        rest.push_back({begin, begin, end - begin, 1, 0, 0});
    }
  return normalize(std::move(rest));
}

int64_t positionCount(const IndexMap &relation) {
  int64_t total = 0;
  for (const IndexBlock &s : relation)
    total += s.length * s.count;
  return total;
}

int64_t runCount(const IndexMap &relation) {
  int64_t total = 0;
  for (const IndexBlock &s : relation)
    total += s.count;
  return total;
}

int64_t map(const IndexMap &relation, int64_t from) {
  for (const IndexBlock &s : relation) {
    const int64_t offset = from - s.from;
    const int64_t block = s.count > 1 ? std::min(offset / s.fromStep, s.count - 1) : 0;
    const int64_t within = offset - block * s.fromStep;
    if (offset >= 0 && within < s.length)
      return s.to + block * s.toStep + within;
  }
  return -1;
}

bool disjointFrom(const IndexMap &a, const IndexMap &b) { return compose(itself(a), itself(b)).empty(); }

bool sameFrom(const IndexMap &a, const IndexMap &b) {
  const int64_t n = positionCount(a);
  return n == positionCount(b) && positionCount(compose(itself(a), itself(b))) == n;
}

std::vector<std::pair<int64_t, int64_t>> expand(const IndexMap &relation) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  pairs.reserve(positionCount(relation));
  for (const IndexBlock &s : relation)
    for (int64_t i = 0; i < s.count; ++i)
      for (int64_t k = 0; k < s.length; ++k)
        pairs.emplace_back(s.from + i * s.fromStep + k, s.to + i * s.toStep + k);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

} // namespace reshard::ir
