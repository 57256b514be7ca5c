// SPDX-License-Identifier: Apache-2.0
// Joins the elements that an endpoint holds of a tensor to boxes.
#include "report/page/drawn_tensor.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"
#include "schema/holdings.h"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace reshard::report {

using namespace schema;

namespace {

constexpr size_t kDrawnHoldings = 64; // drawn for an endpoint
constexpr size_t kHoldingBoxes = 256; // for a rank class
constexpr size_t kNamedRanks = 16;    // named for a rank class

/// Makes all strides positive, sorts them, the largest first, and joins those that continue each other. Returns the new
/// first element.
int64_t normalize(int64_t first, std::vector<Stride> &strides) {
  std::erase_if(strides, [](const Stride &each) { return each.count == 1; });
  for (Stride &each : strides)
    if (each.stride < 0) {
      first += (each.count - 1) * each.stride;
      each.stride = -each.stride;
    }
  std::sort(strides.begin(), strides.end(), [](const Stride &a, const Stride &b) { return a.stride > b.stride; });
  std::vector<Stride> joined;
  for (const Stride &each : strides)
    if (!joined.empty() && joined.back().stride == each.count * each.stride)
      joined.back() = {joined.back().count * each.count, each.stride};
    else
      joined.push_back(each);
  strides = std::move(joined);
  return first;
}

/// Adds the boxes of a part: one set of strides for each combination of index blocks, one of each dimension.
void addPart(const PartGrid &grid, const DrawnMatrix &matrix, size_t d, int64_t first, std::vector<Stride> &strides,
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

void Boxes::add(const DrawnMatrix &matrix, int64_t first, std::vector<Stride> strides) {
  for (const Stride &each : strides)
    if (each.count == 0)
      return;
  first = normalize(first, strides);
  int64_t run = 1, rows = 1; // elements that follow each other, and in how many rows they repeat
  if (!strides.empty() && strides.back().stride == 1) {
    run = strides.back().count;
    strides.pop_back();
  }
  const auto down =
      std::find_if(strides.begin(), strides.end(), [&](const Stride &each) { return each.stride == matrix.columns; });
  if (down != strides.end() && run < matrix.columns) {
    rows = down->count;
    strides.erase(down);
  }
  std::vector<int64_t> at(strides.size());
  for (size_t s = at.size() + 1; s > 0 && !cut_;) {
    WorkDeadline::spend(16);
    addRun(matrix, first, run, rows);
    for (s = at.size(); s > 0; --s) {
      const Stride &stride = strides[s - 1];
      first += stride.stride;
      if (++at[s - 1] < stride.count)
        break;
      first -= stride.count * stride.stride;
      at[s - 1] = 0;
    }
  }
}

/// Adds elements that follow each other, and repeat in `rows` rows.
void Boxes::addRun(const DrawnMatrix &matrix, int64_t begin, int64_t length, int64_t rows) {
  const int64_t column = begin % matrix.columns;
  if (column + length <= matrix.columns)
    return addBox({begin / matrix.columns, begin / matrix.columns + rows, column, column + length});
  for (int64_t r = 0; r < rows && !cut_; ++r)
    for (int64_t from = begin + r * matrix.columns, left = length; left > 0 && !cut_;) {
      const int64_t at = from % matrix.columns, whole = at == 0 ? left / matrix.columns : 0;
      const int64_t width = whole > 0 ? matrix.columns : std::min(left, matrix.columns - at);
      const int64_t height = std::max<int64_t>(whole, 1);
      addBox({from / matrix.columns, from / matrix.columns + height, at, at + width});
      from += height * width;
      left -= height * width;
    }
}

/// Adds a box, or extends the one that ends above it.
void Boxes::addBox(const Box &box) {
  for (Box &above : list_)
    if (above[1] == box[0] && above[2] == box[2] && above[3] == box[3]) {
      above[1] = box[1];
      return;
    }
  cut_ = cut_ || list_.size() >= limit_;
  if (!cut_)
    list_.push_back(box);
}

void Boxes::keep(size_t limit) {
  cut_ = cut_ || list_.size() > limit;
  list_.resize(std::min(list_.size(), limit));
}

nlohmann::ordered_json Boxes::json() const { return list_; }

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
  Boxes boxes(kHoldingBoxes);
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

DrawnHoldings DrawnTensor::holdings(const Endpoint &endpoint) const {
  DrawnHoldings drawn;
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p) {
    const Param &param = *endpoint.params()->Get(p);
    if (!holds(param))
      continue;
    for (const std::vector<uint32_t> &meshRanks : RankClasses(endpoint, p).meshRanks()) {
      Boxes boxes = boxesOf(endpoint, p, meshRanks[0]);
      if (boxes.empty())
        continue;
      if (drawn.list.size() == kDrawnHoldings) {
        ++drawn.left;
        continue;
      }
      DrawnHolding &holding =
          drawn.list.emplace_back(DrawnHolding{param.view() ? param.view()->codes() : p, {}, 0, std::move(boxes)});
      for (const uint32_t meshRank : meshRanks)
        if (holding.ranks.size() < kNamedRanks)
          holding.ranks.push_back(endpoint.ranks()->Get(meshRank));
        else
          ++holding.more;
    }
  }
  return drawn;
}

} // namespace reshard::report
