// Cutting a transfer in two: between its tensors, else inside one where no unit is parted.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Cuts transfers of a module's tiles at a given number of bytes.
class Splitter {
public:
  explicit Splitter(const ir::Module &module) : module_(module) {}

  /// Moves the part of `transfer` that is nearest to its first `bytes` bytes to `head` (appended; nothing where that is
  /// nearest) and leaves the rest, in order, in `rest`. Tensors are cut inside where a cut between them would be more
  /// than `tolerance` bytes off. A cut inside lies at a multiple of the unit of every share on either side.
  void split(const ir::Transfer &transfer, int64_t bytes, int64_t tolerance, std::vector<ir::Transfer> &head,
             std::vector<ir::Transfer> &rest);

private:
  /// Where tensors of a tile may be cut: positions begin + offset + i * unit of the target's side, inside [begin, end),
  /// along its outermost dimension that has such a place.
  struct Grid {
    int64_t dimension = -1; // -1: nowhere
    int64_t begin = 0, end = 0, offset = 0, unit = 1;
  };
  const Grid &grid(uint32_t overlap);
  Grid find(const ir::Overlap &overlap) const;
  void splitTensor(ir::Transfer tensor, int64_t bytes, std::vector<ir::Transfer> &head,
                   std::vector<ir::Transfer> &rest);

  const ir::Module &module_;
  std::vector<Grid> grids_; // by tile, as asked for
  std::vector<bool> known_;
};

} // namespace reshard
