// SPDX-License-Identifier: Apache-2.0
// Cuts a transfer in two: between tensors, or inside a tensor at a multiple of its units.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Cuts transfers of a module at a given number of bytes.
class Splitter {
public:
  explicit Splitter(const ir::Module &module) : module_(module) {}

  /// Cuts `transfer` as near as possible to its first `bytes` bytes. Appends the part before the cut to `head` and the
  /// part after it to `rest`, in order; either can be empty. Cuts inside a tensor only if a cut between tensors would
  /// be more than `tolerance` bytes off. A cut inside a tensor is at a multiple of the units of all shardings of both
  /// sides.
  void split(const ir::Transfer &transfer, int64_t bytes, int64_t tolerance, std::vector<ir::Transfer> &head,
             std::vector<ir::Transfer> &rest);
  /// Moves about `wanted` bytes (or, if `all`, all transfers) from the front of `left` to `part`.
  void take(std::vector<ir::Transfer> &left, int64_t wanted, bool all, std::vector<ir::Transfer> &part);

private:
  /// The positions at which tensors of an overlap may be cut: begin + offset + i * unit, inside [begin, end), local
  /// positions of the target along the outermost dimension that has any.
  struct Grid {
    int64_t dimension = -1; // -1: tensors cannot be cut
    int64_t begin = 0, end = 0, offset = 0, unit = 1;
  };
  const Grid &grid(uint32_t overlap);
  Grid find(const ir::Overlap &overlap) const;
  void splitTensor(ir::Transfer tensor, int64_t bytes, std::vector<ir::Transfer> &head,
                   std::vector<ir::Transfer> &rest);

  const ir::Module &module_;
  std::vector<Grid> grids_; // by overlap, computed on first use
  std::vector<bool> known_;
};

} // namespace reshard
