// The largest magnitudes of parts of source params, which receivers need to quantise whole matrices (nvfp4).
#pragma once

#include "executor/device.h"
#include "executor/transport.h"

namespace reshard {

/// Of one matrix of a part of a source param: what of it lies in the param, in elements.
class LocalAmax {
public:
  /// Matrix `matrix`, in the order of the face, of the part that it shows (FaceKind::amax), at a place.
  LocalAmax(const schema::Endpoint &endpoint, const schema::Param &view, uint32_t meshRank, int64_t matrix);

  /// The largest magnitude, 0 where there is none, NaN where one is not finite, of plain elements or of a param that
  /// stands quantised. Allocates nothing.
  float of(kernels::Format wide, const std::byte *elements) const;
  float of(const kernels::Quantized &matrices) const;

  /// The same into a number of a device.
  void tabulate(kernels::Format wide, const std::byte *elements, std::byte *number, Tables &tables) const;
  void tabulate(const kernels::Quantized &matrices, std::byte *number, Tables &tables) const;

private:
  struct Rectangle {
    uint64_t first, rows, columns, step; // elements; step from row to row
    kernels::Strided shape(uint64_t item) const;
  };
  static void clear(std::byte *number, Tables &tables);
  std::vector<Rectangle> rectangles_;
};

/// The tensor scale of nvfp4 for a matrix of which these are the largest magnitudes of parts.
float tensorScale(const float *amax, uint64_t count);

} // namespace reshard
