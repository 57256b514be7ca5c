#include "executor/local_amax.h"

#include "schema/manifest.h"

#include <algorithm>
#include <cmath>

namespace reshard {

using namespace schema;

namespace {

/// The larger of two amax values; NaN if one of them is.
float larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }

} // namespace

LocalAmax::LocalAmax(const Endpoint &endpoint, const Param &view, uint32_t meshRank, int64_t matrix) {
  const Param &param = *endpoint.params()->Get(view.view()->codes());
  const Part &part = *param.parts()->Get(view.view()->part());
  const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * shape[d];
  // `matrix` gives the positions along the dimensions that index matrices; blocks along the dimensions of a matrix
  // become rectangles.
  struct Dimension {
    IndexMap blocks;
    int64_t stride;
  };
  std::vector<Dimension> dimensions;
  int64_t origin = 0;
  for (uint32_t d = part.dimensions()->size(); d-- > 0;) {
    const PartDimension &at = *part.dimensions()->Get(d);
    if (at.param() < 0)
      continue;
    const IndexMap list = indexMap(endpoint, *endpoint.shardings()->Get(at.sharding()), meshRank);
    const auto dimension = static_cast<size_t>(at.param());
    if (isAmaxDimension(*view.view(), part, d)) {
      dimensions.push_back({list, strides[dimension]});
      continue;
    }
    const int64_t position = matrix % shape[dimension];
    matrix /= shape[dimension];
    origin += position * strides[dimension];
    const bool there = std::any_of(list.begin, list.end, [&](const IndexBlock &run) {
      for (int64_t block = 0; block < run.count(); ++block)
        if (const int64_t first = run.to() + block * run.to_step();
            position >= first && position < first + run.length())
          return true;
      return false;
    });
    if (!there)
      return;
  }
  // The contiguous dimension first, so that it becomes the columns.
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [](const Dimension &a, const Dimension &b) { return a.stride < b.stride; });
  rectangles_.push_back({static_cast<uint64_t>(origin), 1, 1, 0});
  for (const Dimension &dimension : dimensions) {
    std::vector<Rectangle> expanded;
    for (const IndexBlock *run = dimension.blocks.begin; run != dimension.blocks.end; ++run)
      for (int64_t block = 0; block < run->count(); ++block)
        for (const Rectangle &rectangle : rectangles_) {
          Rectangle next = rectangle;
          next.first += static_cast<uint64_t>((run->to() + block * run->to_step()) * dimension.stride);
          const auto length = static_cast<uint64_t>(run->length()), stride = static_cast<uint64_t>(dimension.stride);
          if (stride == 1 && rectangle.columns == 1)
            next.columns = length;
          else if (rectangle.rows == 1) {
            next.rows = length;
            next.step = stride;
          } else {
            for (uint64_t k = 1; k < length; ++k) {
              expanded.push_back(next);
              next.first += stride;
            }
          }
          expanded.push_back(next);
        }
    rectangles_ = std::move(expanded);
  }
}

float LocalAmax::of(kernels::Format wide, const std::byte *elements) const {
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
        kernels::decodeElements(matrices, rectangle.first + row * rectangle.step + at, elements, some);
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

void LocalAmax::tabulate(kernels::Format wide, const std::byte *elements, std::byte *number, Tables &tables) const {
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
