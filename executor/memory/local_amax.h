// SPDX-License-Identifier: Apache-2.0
// Amax values of parts of source params. Receivers need them to compute tensor scales.
#pragma once

#include "executor/interfaces/device.h"
#include "executor/memory/local_rank.h"

namespace reshard {

/// The elements of one matrix of a part that a source param holds on a rank.
class LocalAmax {
public:
  /// Matrix `number` (in the order of the view) of the part of `view`, which has ViewKind::amax, on a mesh rank.
  LocalAmax(const schema::Endpoint &endpoint, const schema::Param &view, uint32_t meshRank, int64_t number);

  /// The amax of plain elements, or of a quantized param: 0 if there are no elements, NaN if one is not finite.
  /// Allocates nothing.
  float of(kernels::NumberFormat wide, const std::byte *elements) const;
  float of(const kernels::Quantized &matrices) const;

  /// Appends to tables the same computation on a device, with its result in *number (fp32).
  void tabulate(kernels::NumberFormat wide, const std::byte *elements, std::byte *number, Tables &tables) const;
  void tabulate(const kernels::Quantized &matrices, std::byte *number, Tables &tables) const;

private:
  struct Rectangle {
    uint64_t first, rows, columns, step; // in elements; `step` is the stride of rows
    kernels::Strided shape(uint64_t item) const;
  };
  struct Matrix;
  static Matrix matrixOf(const schema::Endpoint &endpoint, const schema::Param &view, uint32_t meshRank,
                         int64_t number);
  static void repeat(const Rectangle &rectangle, int64_t first, int64_t length, int64_t stride,
                     std::vector<Rectangle> &repeated);
  static void clear(std::byte *number, Tables &tables);
  std::vector<Rectangle> rectangles_;
};

/// The tensor scale of a matrix, from the amax values of its `count` parts.
float tensorScale(const float *amax, uint64_t count);

} // namespace reshard
