// SPDX-License-Identifier: Apache-2.0
// Cuts the part of a matrix that a rank holds into rectangles of memory, and computes the largest absolute value over
// them.
#include "executor/memory/view_jobs.h"

#include "schema/manifest.h"

#include <algorithm>
#include <cmath>

namespace reshard {

using namespace schema;

namespace {

/// The larger of two amax values; NaN if one of them is.
float larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }

bool contains(const IndexMap &list, int64_t position) {
  return std::any_of(list.begin, list.end, [&](const IndexBlock &block) {
    for (int64_t repetition = 0; repetition < block.count(); ++repetition)
      if (const int64_t first = block.to() + repetition * block.to_step();
          position >= first && position < first + block.length())
        return true;
    return false;
  });
}

} // namespace

/// A matrix in its param: the dimensions along which it extends, and the offset of its position 0 in the others. All in
/// elements.
struct LocalAmax::Matrix {
  struct Dimension {
    IndexMap blocks; // the positions that the part has on this mesh rank
    int64_t stride;
  };
  std::vector<Dimension> dimensions; // by ascending stride
  int64_t origin = 0;
  bool present = true; // on this mesh rank
};

/// `number` is the position along the dimensions that index matrices, the last one fastest.
LocalAmax::Matrix LocalAmax::matrixOf(const Endpoint &endpoint, const Param &view, uint32_t meshRank, int64_t number) {
  const Param &param = *endpoint.params()->Get(view.view()->codes());
  const Part &part = *param.parts()->Get(view.view()->part());
  const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * shape[d];
  Matrix matrix;
  for (uint32_t d = part.dimensions()->size(); d-- > 0;) {
    const PartDimension &at = *part.dimensions()->Get(d);
    if (at.param() < 0)
      continue;
    const IndexMap blocks = indexMap(endpoint, *endpoint.shardings()->Get(at.sharding()), meshRank);
    const auto dimension = static_cast<size_t>(at.param());
    if (isAmaxDimension(*view.view(), part, d)) {
      matrix.dimensions.push_back({blocks, strides[dimension]});
      continue;
    }
    const int64_t position = number % shape[dimension];
    number /= shape[dimension];
    matrix.origin += position * strides[dimension];
    matrix.present = matrix.present && contains(blocks, position);
  }
  std::stable_sort(matrix.dimensions.begin(), matrix.dimensions.end(),
                   [](const auto &a, const auto &b) { return a.stride < b.stride; });
  return matrix;
}

/// Blocks along the dimensions of the matrix become rectangles. The contiguous dimension is the first, and becomes the
/// columns.
LocalAmax::LocalAmax(const Endpoint &endpoint, const Param &view, uint32_t meshRank, int64_t number) {
  const Matrix matrix = matrixOf(endpoint, view, meshRank, number);
  if (!matrix.present)
    return;
  rectangles_.push_back({static_cast<uint64_t>(matrix.origin), 1, 1, 0});
  for (const auto &[blocks, stride] : matrix.dimensions) {
    std::vector<Rectangle> expanded;
    for (const IndexBlock *block = blocks.begin; block != blocks.end; ++block)
      for (int64_t repetition = 0; repetition < block->count(); ++repetition)
        for (const Rectangle &rectangle : rectangles_)
          repeat(rectangle, block->to() + repetition * block->to_step(), block->length(), stride, expanded);
    rectangles_ = std::move(expanded);
  }
}

/// Appends a rectangle repeated at positions [first, first + length) of a dimension.
void LocalAmax::repeat(const Rectangle &rectangle, int64_t first, int64_t length, int64_t stride,
                       std::vector<Rectangle> &repeated) {
  Rectangle next = rectangle;
  next.first += static_cast<uint64_t>(first * stride);
  if (stride == 1 && rectangle.columns == 1) {
    next.columns = static_cast<uint64_t>(length);
  } else if (rectangle.rows == 1) {
    next.rows = static_cast<uint64_t>(length);
    next.step = static_cast<uint64_t>(stride);
  } else {
    for (int64_t k = 1; k < length; ++k) {
      repeated.push_back(next);
      next.first += static_cast<uint64_t>(stride);
    }
  }
  repeated.push_back(next);
}

float LocalAmax::of(kernels::NumberFormat wide, const std::byte *elements) const {
  const uint64_t item = kernels::itemBytes(wide);
  float result = 0;
  for (const Rectangle &rectangle : rectangles_)
    result = larger(kernels::amax(wide, elements + rectangle.first * item,
                                  {rectangle.rows, rectangle.columns, 0, static_cast<int64_t>(rectangle.step * item)}),
                    result);
  return result;
}

float LocalAmax::of(const kernels::Quantized &matrices) const {
  constexpr uint64_t kAtOnce = 2048;
  alignas(64) std::byte elements[kAtOnce * sizeof(float)];
  float result = 0;
  for (const Rectangle &rectangle : rectangles_)
    for (uint64_t row = 0; row < rectangle.rows; ++row)
      for (uint64_t at = 0; at < rectangle.columns; at += kAtOnce) {
        const uint64_t some = std::min(kAtOnce, rectangle.columns - at);
        kernels::decodeElements(matrices, {rectangle.first + row * rectangle.step + at, some}, elements);
        result = larger(kernels::amax(matrices.wide, elements, {1, some, 0, 0}), result);
      }
  return result;
}

kernels::Strided LocalAmax::Rectangle::shape(uint64_t item) const {
  kernels::Strided shape;
  shape.rowBytes = columns * item;
  shape.loopCount = 1;
  shape.loops[0] = {rows, static_cast<int64_t>(step * item), 0};
  return shape;
}

/// Sets the result to 0, the amax of no elements. Copies run before conversions.
void LocalAmax::clear(std::byte *number, Tables &tables) {
  kernels::Strided one;
  one.rowBytes = sizeof(float);
  tables.copies.add(reinterpret_cast<uint64_t>(number), 0, one);
}

void LocalAmax::tabulate(kernels::NumberFormat wide, const std::byte *elements, std::byte *number,
                         Tables &tables) const {
  const uint64_t item = kernels::itemBytes(wide);
  clear(number, tables);
  for (const Rectangle &rectangle : rectangles_)
    tables.conversions.addAmax(reinterpret_cast<uint64_t>(number), wide,
                               reinterpret_cast<uint64_t>(elements) + rectangle.first * item, rectangle.shape(item),
                               nullptr);
}

void LocalAmax::tabulate(const kernels::Quantized &matrices, std::byte *number, Tables &tables) const {
  const uint64_t item = kernels::itemBytes(matrices.wide);
  clear(number, tables);
  for (const Rectangle &rectangle : rectangles_)
    tables.conversions.addAmax(reinterpret_cast<uint64_t>(number), matrices.wide, rectangle.first * item,
                               rectangle.shape(item), &matrices);
}

float tensorScale(const float *amax, uint64_t count) {
  float result = 0;
  for (uint64_t i = 0; i < count; ++i)
    result = larger(amax[i], result);
  return kernels::nvfp4TensorScale(result);
}

} // namespace reshard
