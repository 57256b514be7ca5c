// SPDX-License-Identifier: Apache-2.0
#include "report/page/holders.h"

#include "base/work_deadline.h"
#include "schema/element_ranges.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <map>

namespace reshard::analysis {

using namespace schema;

namespace {

constexpr size_t kDrawnHolders = 64; // of an endpoint that are drawn
constexpr size_t kHolderBoxes = 256; // of a rank class
constexpr size_t kNamedRanks = 16;   // of a rank class that are named

/// Adds the boxes of a part: one set of strides for each combination of index blocks, one of each dimension.
void addPart(const PartGrid &grid, const Matrix &matrix, size_t d, int64_t first, std::vector<Stride> &strides,
             Boxes &boxes) {
  if (d == grid.dimensions.size())
    return boxes.add(matrix, first, strides);
  const PartGrid::Dimension &dimension = grid.dimensions[d];
  for (const IndexBlock &block : dimension.blocks) {
    if (boxes.cut())
      return;
    strides.push_back({block.count(), block.from_step() * dimension.logicalStride});
    strides.push_back({block.length(), dimension.logicalStride});
    addPart(grid, matrix, d + 1, first + block.from() * dimension.logicalStride, strides, boxes);
    strides.resize(strides.size() - 2);
  }
}

} // namespace

DrawnTensor::DrawnTensor(const Manifest &manifest, uint32_t pattern, std::vector<int64_t> values)
    : manifest_(manifest), pattern_(pattern), values_(std::move(values)),
      name_(tensorName(manifest, *manifest.tensor_patterns()->Get(pattern), values_)) {
  const auto *shape = this->pattern().shape();
  for (uint32_t d = 0; shape && d < shape->size(); ++d)
    (d == 0 ? matrix_.rows : matrix_.columns) *= static_cast<int64_t>(shape->Get(d));
}

bool DrawnTensor::holds(const Param &param) const {
  return std::any_of(orEmpty(param.parts()).begin(), orEmpty(param.parts()).end(),
                     [&](const Part *part) { return part->pattern() == static_cast<int32_t>(pattern_); });
}

std::optional<ParamInstance> DrawnTensor::instance(const Endpoint &endpoint, uint32_t p, uint32_t meshRank) const {
  const Param &param = *endpoint.params()->Get(p);
  if ((param.view() && param.view()->kind() != ViewKind::elements) || !holds(param) ||
      instanceCount(endpoint, param, meshRank) == 0)
    return std::nullopt;
  ParamInstance instance;
  instance.param = p;
  instance.shape = localShape(endpoint, param, meshRank);
  for (uint32_t v = 0; v < orEmpty(param.variables()).size(); ++v) {
    int64_t value = 0;
    for (uint32_t t = 0; t < orEmpty(pattern().variables()).size(); ++t)
      if (pattern().variables()->Get(t) == param.variables()->Get(v))
        value = values_[t];
    const IndexMap map = indexMap(endpoint, *endpoint.shardings()->Get(param.instances()->Get(v)), meshRank);
    const std::optional<int64_t> local = map.map(value);
    if (!local)
      return std::nullopt;
    instance.values.push_back(value);
    instance.instance = static_cast<uint32_t>(instance.instance * map.size() + *local);
  }
  return instance;
}

Boxes DrawnTensor::boxesOf(const Endpoint &endpoint, uint32_t param, uint32_t meshRank) const {
  Boxes boxes(kHolderBoxes);
  const std::optional<ParamInstance> found = instance(endpoint, param, meshRank);
  if (!found || matrix_.rows == 0 || matrix_.columns == 0)
    return boxes;
  std::vector<Stride> strides;
  forEachCollapsedGrid({manifest_, endpoint, meshRank, *found}, [&](const PartGrid &grid) {
    if (grid.tensor && *grid.tensor == name_)
      addPart(grid, matrix_, 0, 0, strides, boxes);
  });
  return boxes;
}

Holders DrawnTensor::holders(const Endpoint &endpoint) const {
  Holders holders;
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p) {
    const Param &param = *endpoint.params()->Get(p);
    if (!holds(param))
      continue;
    const QuantizedView *view = param.view();
    std::map<std::vector<int64_t>, size_t> classes; // rank class -> entry of the list, or none
    for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank) {
      WorkDeadline::spend(64);
      const uint32_t rank = endpoint.ranks()->Get(meshRank);
      const auto [at, added] = classes.try_emplace(rankClassKey(endpoint, p, meshRank), SIZE_MAX);
      if (!added && at->second != SIZE_MAX) {
        Holder &holder = holders.list[at->second];
        holder.ranks.size() < kNamedRanks ? holder.ranks.push_back(rank) : void(++holder.more);
      }
      if (!added)
        continue;
      Boxes boxes = boxesOf(endpoint, p, meshRank);
      if (boxes.empty())
        continue;
      if (holders.list.size() == kDrawnHolders) {
        ++holders.left;
        continue;
      }
      at->second = holders.list.size();
      holders.list.push_back({view ? view->codes() : p, {rank}, 0, std::move(boxes)});
    }
  }
  return holders;
}

} // namespace reshard::analysis
