// The source's cut of one dimension of a family into disjoint sets of positions, and which of them a target share
// meets.
#pragma once

#include "compiler/interner.h"

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
Bounds bounds(const ir::Segments &segments);

/// The blocks of disjoint sets, by where they begin: what meets a share is found without looking at each set.
class BlockIndex {
public:
  /// None where two sets overlap, or where they have too many blocks to list.
  static std::optional<BlockIndex> of(const std::vector<const ir::Segments *> &sets);
  /// Numbers of the sets that a share meets, ascending. None where the share has too many blocks to look each up.
  std::optional<llvm::SmallVector<unsigned, 1>> meeting(const ir::Segments &share) const;

private:
  struct Block {
    int64_t begin, end;
    unsigned set;
  };
  std::vector<Block> blocks_;
};

class Atoms {
public:
  /// Cuts the distinct source shares of a dimension into disjoint sets. Shares that are equal or disjoint (the rule)
  /// are atoms as they stand; others (a tensor held under two shardings, or an index value placed twice) are refined by
  /// set differences.
  Atoms(std::vector<unsigned> shares, const Interner<ir::Segments> &segments);

  const std::vector<ir::Segments> &sets() const {
    return sets_;
  } // ascending by first position, but for what was refined
  /// The atoms of an interned source share.
  llvm::ArrayRef<unsigned> of(unsigned share) const { return of_.at(share); }
  /// Whether every source share is one atom.
  bool whole() const { return whole_; }
  /// The atoms that an interned target share meets, ascending.
  llvm::ArrayRef<unsigned> meeting(unsigned share);
  /// Whether more pairs of sets had to be compared than this pass is given time for: then the results are not complete.
  bool tooMany() const { return pairs_ > kMostPairs; }

private:
  static constexpr int64_t kMostPairs = 1 << 24;

  void refine(unsigned share, std::vector<size_t> &active);

  const Interner<ir::Segments> &segments_;
  std::vector<ir::Segments> sets_;
  std::vector<Bounds> limits_;                // of the sets
  std::vector<std::vector<unsigned>> shares_; // of each set, while they are refined
  std::unordered_map<unsigned, llvm::SmallVector<unsigned, 1>> of_, meeting_;
  std::optional<BlockIndex> index_;
  bool whole_ = true;
  int64_t pairs_ = 0;
};

} // namespace reshard
