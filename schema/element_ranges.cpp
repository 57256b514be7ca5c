// SPDX-License-Identifier: Apache-2.0
// Makes a grid of each part of an instance, with the positions of one tensor along each dimension, and visits its rows
// as ranges.
#include "schema/element_ranges.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::schema {

namespace {

using Dimension = PartGrid::Dimension;
using GridVisitor = std::function<void(const PartGrid &)>;
using RangeVisitor = std::function<void(const ElementRange &)>;

/// The grids of one part of an instance, one for each of its tensors.
class PartGrids {
public:
  PartGrids(const InstanceLayout &layout, uint32_t number)
      : layout_(layout), part_(*layout.endpoint.params()->Get(layout.instance.param)->parts()->Get(number)),
        param_(*layout.endpoint.params()->Get(layout.instance.param)),
        pattern_(part_.pattern() < 0 ? nullptr
                                     : layout.manifest.tensor_patterns()->Get(static_cast<uint32_t>(part_.pattern()))),
        values_(pattern_ ? orEmpty(pattern_->variables()).size() : orEmpty(param_.variables()).size(), 0) {
    grid_.pattern = part_.pattern();
    grid_.part = number;
    grid_.values = &values_;
  }

  void forEach(const GridVisitor &visit) {
    if (!readDimensions())
      return;
    visitSlots(0, 0, visit);
  }

private:
  /// Fills the dimensions of the grid. Returns false if this instance has no tensor of the part: its name variables
  /// have values that the part does not hold.
  bool readDimensions() {
    const std::vector<int64_t> logicalStrides = this->logicalStrides(), localStrides = this->localStrides();
    bool holds = true;
    for (size_t d = 0; d < logicalStrides.size(); ++d) {
      const PartDimension &at = *part_.dimensions()->Get(static_cast<uint32_t>(d));
      const IndexMap map =
          indexMap(layout_.endpoint, *layout_.endpoint.shardings()->Get(at.sharding()), layout_.meshRank);
      const bool variable = d < values_.size();
      if (variable && at.param() < 0) { // a name variable, whose value the instance fixes
        if (pattern_)
          holds = map.map(values_[d] = valueOf(d)).has_value() && holds;
        continue;
      }
      Dimension dimension{{map.begin, map.end}, logicalStrides[d], localStrides[static_cast<size_t>(at.param())]};
      if (variable)
        stacks_.emplace_back(d, std::move(dimension));
      else
        grid_.dimensions.push_back(std::move(dimension));
    }
    return holds;
  }

  /// The value of the pattern's variable `d` in this instance; 0 if the param's name has no such variable.
  int64_t valueOf(size_t d) const {
    for (size_t v = 0; v < layout_.instance.values.size(); ++v)
      if (param_.variables()->Get(static_cast<uint32_t>(v)) == pattern_->variables()->Get(static_cast<uint32_t>(d)))
        return layout_.instance.values[v];
    return 0;
  }

  std::vector<int64_t> localStrides() const {
    const std::vector<int64_t> &shape = layout_.instance.shape;
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t d = strides.size(); d-- > 1;)
      strides[d - 1] = strides[d] * shape[d];
    return strides;
  }

  /// By dimension of the part; 0 for variables and for padding.
  std::vector<int64_t> logicalStrides() const {
    std::vector<int64_t> strides(orEmpty(part_.dimensions()).size(), 0);
    int64_t stride = 1;
    for (size_t d = strides.size(); pattern_ && d-- > values_.size();) {
      strides[d] = stride;
      stride *= static_cast<int64_t>(pattern_->shape()->Get(static_cast<uint32_t>(d - values_.size())));
    }
    return strides;
  }

  /// Stacked variables make one tensor for each combination of their values: visits those of the stacks from `stack`
  /// on, whose first element is at `local`.
  void visitSlots(size_t stack, int64_t local, const GridVisitor &visit) {
    if (stack == stacks_.size()) {
      grid_.local = local;
      return visitTensor(visit);
    }
    const auto &[variable, slots] = stacks_[stack];
    for (const IndexBlock &r : slots.blocks)
      for (int64_t block = 0; block < r.count(); ++block)
        for (int64_t k = 0; k < r.length(); ++k) {
          values_[variable] = r.from() + block * r.from_step() + k;
          visitSlots(stack + 1, local + (r.to() + block * r.to_step() + k) * slots.localStride, visit);
        }
  }

  void visitTensor(const GridVisitor &visit) {
    WorkDeadline::spend(8);
    const std::string name = pattern_ ? tensorName(layout_.manifest, *pattern_, values_) : std::string();
    grid_.tensor = pattern_ ? &name : nullptr;
    visit(grid_);
  }

  const InstanceLayout &layout_;
  const Part &part_;
  const Param &param_;
  const TensorPattern *pattern_;                     // null: padding
  std::vector<int64_t> values_;                      // what the pattern's variables are in this tensor
  std::vector<std::pair<size_t, Dimension>> stacks_; // number of the variable in `values_`, its dimension
  PartGrid grid_;
};

/// Visits the elements of a grid as ranges along its last dimension.
class RangeWalk {
public:
  RangeWalk(const PartGrid &grid, const RangeVisitor &visit) : dimensions_(grid.dimensions), visit_(visit) {
    range_.tensor = grid.tensor;
    range_.pattern = grid.pattern;
  }

  /// Visits dimensions `d` and later, at these positions along the dimensions before it.
  void visit(size_t d, int64_t logical, int64_t local) {
    if (d == dimensions_.size())
      return add({nullptr, -1, logical, 1, local, 1, 1});
    const Dimension &dimension = dimensions_[d];
    for (const IndexBlock &r : dimension.blocks)
      for (int64_t block = 0; block < r.count(); ++block) {
        const int64_t from = logical + (r.from() + block * r.from_step()) * dimension.logicalStride,
                      to = local + (r.to() + block * r.to_step()) * dimension.localStride;
        if (d + 1 == dimensions_.size()) {
          add({nullptr, -1, from, dimension.logicalStride, to, dimension.localStride, r.length()});
          continue;
        }
        for (int64_t k = 0; k < r.length(); ++k)
          visit(d + 1, from + k * dimension.logicalStride, to + k * dimension.localStride);
      }
  }

private:
  void add(ElementRange range) {
    range.tensor = range_.tensor;
    range.pattern = range_.pattern;
    visit_(range);
  }

  const std::vector<Dimension> &dimensions_;
  const RangeVisitor &visit_;
  ElementRange range_; // the tensor
};

/// The positions of a dimension as blocks without repetitions, ascending.
std::vector<IndexBlock> ascending(const Dimension &dimension) {
  std::vector<IndexBlock> blocks;
  for (const IndexBlock &r : dimension.blocks)
    for (int64_t block = 0; block < r.count(); ++block)
      blocks.emplace_back(r.from() + block * r.from_step(), r.to() + block * r.to_step(), r.length(), 1, 0, 0);
  std::sort(blocks.begin(), blocks.end(), [](const IndexBlock &a, const IndexBlock &b) { return a.from() < b.from(); });
  return blocks;
}

} // namespace

int64_t PartGrid::Dimension::positions() const { return IndexMap{blocks.data(), blocks.data() + blocks.size()}.size(); }

int64_t PartGrid::elements() const {
  int64_t elements = 1;
  for (const Dimension &dimension : dimensions)
    elements *= dimension.positions();
  return elements;
}

std::pair<int64_t, int64_t> PartGrid::places() const {
  int64_t first = local, last = local;
  for (const Dimension &dimension : dimensions) {
    int64_t least = INT64_MAX, greatest = INT64_MIN;
    for (const IndexBlock &r : ascending(dimension)) {
      least = std::min(least, r.to());
      greatest = std::max(greatest, r.to() + r.length() - 1);
    }
    first += least * dimension.localStride;
    last += greatest * dimension.localStride;
  }
  return {first, last + 1};
}

void PartGrid::collapse() {
  while (dimensions.size() > 1) {
    const Dimension &last = dimensions.back();
    Dimension &outer = dimensions[dimensions.size() - 2];
    if (last.blocks.size() != 1 || last.blocks[0].count() != 1 || last.blocks[0].from() != 0 ||
        last.blocks[0].to() != 0)
      return;
    const int64_t n = last.blocks[0].length();
    if (outer.logicalStride != n * last.logicalStride || outer.localStride != n * last.localStride)
      return;
    for (IndexBlock &r : outer.blocks)
      r = IndexBlock(r.from() * n, r.to() * n, r.length() * n, r.count(), r.from_step() * n, r.to_step() * n);
    outer.logicalStride = last.logicalStride;
    outer.localStride = last.localStride;
    dimensions.pop_back();
  }
}

void forEachGrid(const InstanceLayout &layout, const GridVisitor &visit) {
  const uint32_t parts = orEmpty(layout.endpoint.params()->Get(layout.instance.param)->parts()).size();
  for (uint32_t part = 0; part < parts; ++part)
    PartGrids(layout, part).forEach(visit);
}

void forEachCollapsedGrid(const InstanceLayout &layout, const GridVisitor &visit) {
  forEachGrid(layout, [&](const PartGrid &grid) {
    PartGrid collapsed = grid;
    collapsed.collapse();
    visit(collapsed);
  });
}

void forEachRange(const InstanceLayout &layout, const RangeVisitor &visit) {
  forEachCollapsedGrid(layout, [&](const PartGrid &grid) {
    forEachRangeOf(grid, [&](const ElementRange &range) {
      WorkDeadline::spend(range.count);
      visit(range);
    });
  });
}

void forEachRangeOf(const PartGrid &grid, const RangeVisitor &visit) { RangeWalk(grid, visit).visit(0, 0, grid.local); }

std::optional<PartGrid> overlap(const PartGrid &a, const PartGrid &b) {
  PartGrid both = a;
  for (size_t d = 0; d < a.dimensions.size(); ++d) {
    std::vector<IndexBlock> &blocks = both.dimensions[d].blocks;
    blocks.clear();
    const std::vector<IndexBlock> mine = ascending(a.dimensions[d]), theirs = ascending(b.dimensions[d]);
    for (size_t i = 0, j = 0; i < mine.size() && j < theirs.size();) {
      const int64_t mineEnd = mine[i].from() + mine[i].length(), theirEnd = theirs[j].from() + theirs[j].length();
      const int64_t from = std::max(mine[i].from(), theirs[j].from()), length = std::min(mineEnd, theirEnd) - from;
      if (length > 0)
        blocks.emplace_back(from, mine[i].to() + from - mine[i].from(), length, 1, 0, 0);
      ++(mineEnd < theirEnd ? i : j);
    }
    if (blocks.empty())
      return std::nullopt;
  }
  return both;
}

} // namespace reshard::schema
