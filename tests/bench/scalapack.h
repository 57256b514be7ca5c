// SPDX-License-Identifier: Apache-2.0
// ScaLAPACK's pdgemr2d for comparison: moves a matrix of fp64 from one block-cyclic layout to another.
#pragma once

#include "executor/load/load.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

extern "C" {
void Cblacs_get(int context, int what, int *value);
void Cblacs_gridmap(int *context, int *map, int leading, int rows, int columns);
void Cpdgemr2d(int rows, int columns, double *from, int fromRow, int fromColumn, int *fromDescriptor, double *to,
               int toRow, int toColumn, int *toDescriptor, int context);
}

namespace reshard {

/// ScaLAPACK is column-major, reshard row-major: ScaLAPACK sees the transposed matrix, so its rows are our dimension 1.
class ScalapackMove {
public:
  /// One side: the block size of each of our dimensions, and their mesh axes.
  struct Side {
    std::array<int, 2> blocks;
    std::array<std::string, 2> axes;
    double *local;
  };

  ScalapackMove(const Plan &plan, std::array<int, 2> shape, const Side &source, const Side &target, uint32_t rank)
      : shape_(shape) {
    const Side *sides[2] = {&source, &target};
    for (uint32_t e : {0u, 1u}) {
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(e);
      int sizes[2] = {1, 1}, meshRank = 0;
      auto coordinate = [&](uint32_t at, int dimension) {
        for (const schema::Axis *axis : *endpoint.axes())
          if (axis->name()->str() == sides[e]->axes[dimension]) {
            sizes[dimension] = static_cast<int>(axis->size());
            return static_cast<int>(at / axis->stride() % axis->size());
          }
        return 0;
      };
      coordinate(0, 0);
      coordinate(0, 1);
      std::vector<int> map(endpoint.ranks()->size());
      for (uint32_t at = 0; at < map.size(); ++at) {
        map[static_cast<size_t>(coordinate(at, 1) + coordinate(at, 0) * sizes[1])] =
            static_cast<int>(endpoint.ranks()->Get(at));
        meshRank = endpoint.ranks()->Get(at) == rank ? static_cast<int>(at) : meshRank;
      }
      int context;
      Cblacs_get(0, 0, &context);
      Cblacs_gridmap(&context, map.data(), sizes[1], sizes[1], sizes[0]);
      context_ = context;
      int leading = 0; // local extent of dimension 1
      const int mine = coordinate(static_cast<uint32_t>(meshRank), 1), block = sides[e]->blocks[1];
      for (int begin = mine * block; begin < shape[1]; begin += sizes[1] * block)
        leading += std::min(block, shape[1] - begin);
      descriptors_[e] = {1, context, shape[1], shape[0], block, sides[e]->blocks[0], 0, 0, std::max(1, leading)};
      local_[e] = sides[e]->local;
    }
  }

  void operator()() {
    Cpdgemr2d(shape_[1], shape_[0], local_[0], 1, 1, descriptors_[0].data(), local_[1], 1, 1, descriptors_[1].data(),
              context_);
  }

private:
  std::array<int, 2> shape_;
  std::array<std::array<int, 9>, 2> descriptors_;
  std::array<double *, 2> local_;
  int context_ = 0; // BLACS context of all processes
};

} // namespace reshard
