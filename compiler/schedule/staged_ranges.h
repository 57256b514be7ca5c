// SPDX-License-Identifier: Apache-2.0
// Staging of elements that are quantized only when whole blocks have arrived. A rank stages rows of blocks of its
// params in its arena, as many in each phase as fit.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

/// Steps with the same value are scheduled together: an epoch (targets that joined at one time), and in it a phase (the
/// ranges that a rank stages at one time).
struct EpochPhase {
  uint32_t epoch = 0, phase = 0;
  auto operator<=>(const EpochPhase &) const = default;
};

/// Whole rows of blocks of one instance of a quantized view.
struct StagedRange {
  unsigned endpoint = 0;
  int32_t meshRank = 0;
  uint32_t instance = 0;      // numbered over all params of the mesh rank
  int64_t begin = 0, end = 0; // bytes of the instance
  uint32_t phase = 0;         // in the epoch of the mesh rank; ranges of one phase are in the arena at the same time
  int64_t offset = 0;         // in the arena
};

class StagedRanges {
public:
  explicit StagedRanges(const ir::Layout &layout);

  /// Plans all ranks. `remote`: bytes that are sent between ranks, whose messages need a part of the staging limit.
  /// Returns a StagingLimitError if one row of blocks does not fit the staging limit.
  llvm::Error plan(int64_t remote);

  /// The world rank that writes an instance of a quantized view, or of its amax: the mesh rank's own, or for files one
  /// rank for each instance. -1: any rank may write it.
  int32_t writer(unsigned endpoint, int32_t meshRank, uint32_t instance) const;
  /// Whether descriptors to this instance must be cut at instances and staged ranges: the instance is staged, or one
  /// rank must write it to a file.
  bool needsCut(unsigned endpoint, int32_t meshRank, uint32_t instance) const {
    return find(endpoint, meshRank, instance, 0) ||
           (layout_.endpoints[endpoint].storage && writer(endpoint, meshRank, instance) >= 0);
  }
  /// The param of an instance of a mesh rank.
  unsigned paramOf(unsigned endpoint, int32_t meshRank, uint32_t instance) const;
  /// The staged range that contains a byte of an instance; null if the instance is not staged.
  const StagedRange *find(unsigned endpoint, int32_t meshRank, uint32_t instance, int64_t offset) const;
  /// The first phase in which elements of a param may arrive if they are not staged. Elements that are quantized with
  /// tensor scales need the amax that arrive in phase 0.
  uint32_t phaseOf(const ir::Param &param) const;

  /// The ranges of a world rank, in the order of their phases, and the bytes of the arena that they occupy.
  const std::vector<StagedRange> &of(int32_t rank) const { return ranges_[rank]; }
  int64_t bytes(int32_t rank) const { return bytes_[rank]; }

private:
  struct Rows {
    StagedRange all;    // the whole instance
    int64_t row = 0;    // bytes of a row of blocks
    int64_t matrix = 0; // bytes of a matrix, whose last row of blocks may have fewer
    bool later = false; // not before phase 1
    std::string name;   // the param's name, for errors
  };
  std::vector<std::vector<Rows>> rows() const;
  void planRank(int32_t rank, std::vector<Rows> &rows, int64_t limit);

  const ir::Layout &layout_;
  std::vector<std::vector<std::vector<uint32_t>>> firsts_; // by endpoint, mesh rank and param: the first instance
  std::vector<std::vector<StagedRange>> ranges_;           // by rank
  std::vector<int64_t> bytes_;
  std::map<std::tuple<unsigned, int32_t, uint32_t>, std::vector<StagedRange>> byInstance_;
};

/// Appends the parts of a descriptor, cut so that each is of one instance and, if that is staged, in one staged range.
/// Interns the shapes of the parts.
void cutAtStagedRanges(const ir::Descriptor &descriptor, const StagedRanges &stagedRanges, Interner<ir::Shape> &shapes,
                       std::vector<ir::Descriptor> &parts);

} // namespace reshard
