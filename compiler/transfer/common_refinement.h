// SPDX-License-Identifier: Apache-2.0
// The common refinement of the source's index maps of one dimension: disjoint sets of positions (cells), and the cells
// that a target's index map intersects.
#pragma once

#include "compiler/resolve/interner.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace reshard {

/// The range [begin, end) from the first to the last logical position of an index map.
struct Bounds {
  int64_t begin, end;
};
Bounds bounds(const ir::IndexMap &indexMap);

/// The blocks of disjoint sets, ordered by position: finds the sets that an index map intersects without visiting each
/// set.
class BlockIndex {
public:
  /// Returns nothing if two sets overlap, or if the sets have more blocks than is worth listing.
  static std::optional<BlockIndex> of(const std::vector<const ir::IndexMap *> &sets);
  /// The numbers of the sets that an index map intersects, ascending. Returns nothing if the index map has more blocks
  /// than all sets together: comparing it with each set is then faster.
  std::optional<llvm::SmallVector<unsigned, 1>> intersecting(const ir::IndexMap &indexMap) const;

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
  CommonRefinement(const std::vector<unsigned> &numbers, const Interner<ir::IndexMap> &indexMaps);

  /// The cells, ascending by first position; cells that refinement added are at the end.
  const std::vector<ir::IndexMap> &cells() const { return cells_; }
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

  const Interner<ir::IndexMap> &indexMaps_;
  std::vector<ir::IndexMap> cells_;
  std::vector<Bounds> limits_;                // by cell
  std::vector<std::vector<unsigned>> owners_; // the index maps that contain each cell, while cells are refined
  std::unordered_map<unsigned, llvm::SmallVector<unsigned, 1>> of_, intersecting_;
  std::optional<BlockIndex> index_;
  bool whole_ = true;
  int64_t pairs_ = 0;
};

} // namespace reshard
