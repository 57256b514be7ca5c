// Periodic segment lists: the one relation that carries sharding, packing, placing and transfers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace reshard::ir {

/// `count` blocks of `length` consecutive positions: block i relates [from + i*fromStep, +length) on one
/// integer line to [to + i*toStep, +length) on another, in order. All units are positions (rows, columns,
/// index values), never bytes. Example: 2 of every 8 rows, packed, is {0, 0, 2, n/8, 8, 2}.
struct IndexBlock {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  int64_t count = 1;
  int64_t fromStep = 0; // 0 where count is 1
  int64_t toStep = 0;   // 0 where count is 1

  bool operator==(const IndexBlock &) const = default;
};

/// A relation: segments sorted by `from`, no position of `from` in two of them. The empty list relates nothing.
using IndexMap = std::vector<IndexBlock>;

/// The relation that maps [0, n) to itself; empty where n is 0.
IndexMap identity(int64_t n);

/// The same pairs, seen from the other side. `to` must be free of repeats.
IndexMap inverse(const IndexMap &relation);

/// All (x, z) with (x, y) in `first` and (y, z) in `second`. Two periodic segments are solved over one common
/// period (LCM of their steps) and repeated, so that the result's size does not grow with their counts.
IndexMap compose(const IndexMap &first, const IndexMap &second);

/// `relation` for those `from` positions alone that `set` has (its `to` side is ignored).
IndexMap restrict(const IndexMap &relation, const IndexMap &set);

/// The same `from` positions, numbered 0, 1, 2 … in ascending order on the `to` side.
IndexMap dense(const IndexMap &relation);

/// Sorted by `from`, adjacent segments joined and equal ones at a constant distance folded into a period.
IndexMap normalize(IndexMap indexBlocks);

/// How many positions it relates.
int64_t size(const IndexMap &relation);

/// Where position `from` goes, or -1.
int64_t map(const IndexMap &relation, int64_t from);

/// Whether the two have the same `from` positions, or none in common.
bool sameFrom(const IndexMap &a, const IndexMap &b);
bool disjointFrom(const IndexMap &a, const IndexMap &b);

/// Positions of `a` that `b` lacks, on the `from` side, each related to itself. Blocks are listed one by one where the
/// two interleave, so use it on small or regular lists.
IndexMap difference(const IndexMap &a, const IndexMap &b);

/// Every pair, one by one, sorted by `from`. For small lists (index values), not for rows.
std::vector<std::pair<int64_t, int64_t>> expand(const IndexMap &relation);

} // namespace reshard::ir
