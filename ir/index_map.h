// SPDX-License-Identifier: Apache-2.0
// Relations between positions, kept as lists of periodic blocks. Sharding, packing, placement and transfers all use
// them.
#pragma once

#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace reshard::ir {

/// An index block: `length` consecutive positions, repeated `count` times. Repetition i relates
/// [from + i * fromStep, + length) to [to + i * toStep, + length), in order. All numbers are positions (rows, columns,
/// index values), never bytes. Example: 2 of every 8 rows, packed, is {0, 0, 2, n/8, 8, 2}.
struct IndexBlock {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  int64_t count = 1;
  int64_t fromStep = 0; // 0 if count is 1
  int64_t toStep = 0;   // 0 if count is 1

  bool operator==(const IndexBlock &) const = default;
};

/// A relation: index blocks sorted by `from`, no `from` position in two of them. The empty list relates nothing. Most
/// relations have one block, which lies inside the list: a large job has a million of them.
using IndexMap = llvm::SmallVector<IndexBlock, 1>;

/// The relation that maps [0, n) to itself; empty if n is 0.
IndexMap identity(int64_t n);

/// All (y, x) with (x, y) in `relation`. No `to` position may occur twice.
IndexMap inverse(const IndexMap &relation);

/// All (x, z) with (x, y) in `first` and (y, z) in `second`. Two periodic blocks are composed over one common period
/// (the LCM of their steps), so that the size of the result does not grow with their counts.
IndexMap compose(const IndexMap &first, const IndexMap &second);

/// The pairs of `relation` whose `from` position is also a `from` position of `set`. The `to` side of `set` is ignored.
IndexMap restrict(const IndexMap &relation, const IndexMap &set);

/// The same `from` positions, numbered 0, 1, 2 … in ascending order on the `to` side.
IndexMap dense(const IndexMap &relation);

/// The normal form: sorted by `from`, adjacent blocks joined, equal blocks at constant distances folded into one.
IndexMap normalize(IndexMap indexBlocks);

/// The number of pairs. (Not `size`: a call would find llvm::size, which counts the blocks.)
int64_t positionCount(const IndexMap &relation);

/// The number of runs of consecutive positions: a block repeats its run `count` times.
int64_t runCount(const IndexMap &relation);

/// The `to` position of `from`, or -1.
int64_t map(const IndexMap &relation, int64_t from);

/// Whether both have the same `from` positions.
bool sameFrom(const IndexMap &a, const IndexMap &b);
/// Whether they have no `from` position in common.
bool disjointFrom(const IndexMap &a, const IndexMap &b);

/// The `from` positions of `a` that `b` lacks, each related to itself. The result is not periodic where the two
/// interleave, so its size grows with their counts: use it on small or regular relations.
IndexMap difference(const IndexMap &a, const IndexMap &b);

/// All pairs, sorted by `from`. For small relations (index values), not for rows.
std::vector<std::pair<int64_t, int64_t>> expand(const IndexMap &relation);

} // namespace reshard::ir

namespace reshard {

constexpr int64_t floorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
constexpr int64_t ceilDivide(int64_t a, int64_t b) { return -floorDivide(-a, b); }

} // namespace reshard
