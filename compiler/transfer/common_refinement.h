// The source's cut of one dimension of a family into disjoint sets of positions, and which of them a target share
// meets.
#pragma once

#include "compiler/resolve/interner.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace reshard {

/// The positions from the first to behind the last.
struct Bounds {
  int64_t begin, end;
};
Bounds bounds(const ir::IndexMap &indexMap);

/// The blocks of disjoint sets, by where they begin: what meets a share is found without looking at each set.
class BlockIndex {
public:
  /// None where two sets overlap, or where they have too many blocks to list.
  static std::optional<BlockIndex> of(const std::vector<const ir::IndexMap *> &sets);
  /// Numbers of the sets that a share meets, ascending. None where the share has too many blocks to look each up.
  std::optional<llvm::SmallVector<unsigned, 1>> meeting(const ir::IndexMap &sharding) const;

private:
  struct Block {
    int64_t begin, end;
    unsigned set;
  };
  std::vector<Block> blocks_;
};

class CommonRefinement {
public:
  /// Cuts the distinct source shares of a dimension into disjoint sets. Shares that are equal or disjoint (the rule)
  /// are atoms as they stand; others (a tensor held under two shardings, or an index value placed twice) are refined by
  /// set differences.
  CommonRefinement(std::vector<unsigned> shardings, const Interner<ir::IndexMap> &indexMap);

  const std::vector<ir::IndexMap> &cells() const {
    return cells_;
  } // ascending by first position, but for what was refined
  /// The atoms of an interned source share.
  llvm::ArrayRef<unsigned> of(unsigned sharding) const { return of_.at(sharding); }
  /// Whether every source share is one atom.
  bool whole() const { return whole_; }
  /// The atoms that an interned target share meets, ascending.
  llvm::ArrayRef<unsigned> meeting(unsigned sharding);
  /// Whether more pairs of sets had to be compared than this pass is given time for: then the results are not complete.
  bool tooMany() const { return pairs_ > kMostPairs; }

private:
  static constexpr int64_t kMostPairs = 1 << 24;

  void refine(unsigned sharding, std::vector<size_t> &active);

  const Interner<ir::IndexMap> &indexMaps_;
  std::vector<ir::IndexMap> cells_;
  std::vector<Bounds> limits_;                   // of the sets
  std::vector<std::vector<unsigned>> shardings_; // of each set, while they are refined
  std::unordered_map<unsigned, llvm::SmallVector<unsigned, 1>> of_, meeting_;
  std::optional<BlockIndex> index_;
  bool whole_ = true;
  int64_t pairs_ = 0;
};

} // namespace reshard
