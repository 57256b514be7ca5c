// SPDX-License-Identifier: Apache-2.0
// The ranks of the copies of a job (ir/copies.h).
#pragma once

#include "ir/copies.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// "First" ranks are the ranks of the first copy of the source, and of all copies of the target that it serves. The
/// ranks of another copy of the source, and of the targets that this serves, repeat their steps.
class RankCopies {
public:
  explicit RankCopies(const ir::Layout &layout);

  const ir::Copies &copies() const { return copies_; }
  /// The mesh rank of the target on a rank; -1 if it has none, or if no copies are folded.
  int32_t targetOn(int32_t rank) const { return targetOn_.empty() ? -1 : targetOn_[static_cast<size_t>(rank)]; }
  /// The rank of a copy of the target that has the part of a rank of its first copy.
  int32_t target(int32_t rank, int64_t copy) const;
  /// The rank of the first copy of the target that has the part of a rank of the target; other ranks: the same.
  int32_t inFirstTarget(int32_t rank) const;

  struct First {
    int32_t rank;
    int64_t copy; // a copy of the source
  };
  /// The rank whose steps a rank repeats, and the copy in which it does.
  First first(int32_t rank) const;
  /// The rank that repeats the steps of a first rank in a copy of the source.
  int32_t repeating(int32_t first, int64_t copy) const;

private:
  const ir::Layout &layout_;
  const ir::Copies copies_;
  std::vector<int32_t> sourceOn_, targetOn_; // by rank: its mesh rank or -1; empty if no copies are folded
};

} // namespace reshard
