// SPDX-License-Identifier: Apache-2.0
// A flat buffer: several tensors stored one after the other (ZeRO, FSDP1). All dimensions of a tensor map to the
// param's one dimension, where their local positions add up. A rank's range cuts a tensor into a few parts
// (flat_part.h): its complete outer positions, and an incomplete one at either end, which again consists of complete
// inner positions and incomplete ones.

#include "compiler/frontend/scheme_table.h"
#include "compiler/resolve/params.h"

#include <algorithm>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

/// Replaces each `to` position p by base + p * stride.
IndexMap spread(const IndexMap &relation, int64_t stride, int64_t base) {
  IndexMap result;
  for (const IndexBlock &s : relation) {
    if (stride == 1) {
      result.push_back({s.from, s.to + base, s.length, s.count, s.fromStep, s.toStep});
    } else if (s.count > 1 && s.length <= s.count) {
      for (int64_t k = 0; k < s.length; ++k)
        result.push_back({s.from + k, base + (s.to + k) * stride, 1, s.count, s.fromStep, s.toStep * stride});
    } else {
      for (int64_t i = 0; i < s.count; ++i)
        result.push_back({s.from + i * s.fromStep, base + (s.to + i * s.toStep) * stride, 1, s.length,
                          s.length > 1 ? 1 : 0, s.length > 1 ? stride : 0});
    }
  }
  return ir::normalize(std::move(result));
}

} // namespace

/// Adds parts for each tensor of each entry, then zeros for positions of no entry.
bool Params::addFlatParts(Building &building) const {
  const Dimension &buffer = building.dimensions[0];
  constexpr size_t kMaxFlatEntries = 1 << 22; // entries times ranks
  if (building.pack.of.size() * buffer.shards.at.size() > kMaxFlatEntries) {
    diagnostics_.error(building.declaration.at, building.title() + " has " + std::to_string(building.pack.of.size()) +
                                                    " entries over " + std::to_string(buffer.shards.at.size()) +
                                                    " ranks, expected entries times ranks of at most " +
                                                    std::to_string(kMaxFlatEntries));
    return false;
  }
  std::vector<FlatInterval> ranges; // by coordinate
  for (const IndexMap &sharding : buffer.shards.at) {
    if (sharding.size() > 1 || (sharding.size() == 1 && sharding[0].count > 1)) {
      diagnostics_.error(building.declaration.at, building.title() +
                                                      " is flat, expected a rule that gives each rank one range: " +
                                                      schemesWith(&SchemeRow::contiguous));
      return false;
    }
    ranges.push_back(sharding.empty() ? FlatInterval{}
                                      : FlatInterval{sharding[0].from, sharding[0].from + sharding[0].length});
  }
  building.param.shape.push_back(extentOf(buffer));
  size_t leaf = 0;
  for (size_t e = 0; e < building.pack.of.size(); ++e) {
    const PackTree &entry = building.pack.of[e];
    std::vector<std::vector<IndexMap>> indexMaps; // by the entry's dimension and tensor: tensor position -> the entry's
    indexMaps.reserve(entry.shape.size());
    for (size_t f = 0; f < entry.shape.size(); ++f)
      indexMaps.push_back(joinedIndexMaps(entry, static_cast<int64_t>(f)));
    for (size_t i = 0, count = leaves(entry).size(); i < count; ++i, ++leaf) {
      std::vector<IndexMap> ofTensor;
      ofTensor.reserve(indexMaps.size());
      for (const auto &list : indexMaps)
        ofTensor.push_back(list[i]);
      addEntry(building, *building.leaves[leaf], entry.shape, building.pack.starts[e], ofTensor, ranges);
    }
  }
  addGaps(building, ranges);
  return true;
}

/// Adds the parts of one tensor of an entry of `shape`, which begins at position `start` of the buffer.
void Params::addEntry(Building &building, const PackTree &tensor, const std::vector<int64_t> &shape, int64_t start,
                      const std::vector<IndexMap> &indexMaps, const std::vector<FlatInterval> &ranges) const {
  const unsigned patternNumber = tensors_.all()[tensor.tensor].pattern;
  const ir::TensorPattern &pattern = tensors_.tensorPatterns()[patternNumber];
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * shape[d];
  ir::Part part;
  part.pattern = static_cast<int>(patternNumber);
  for (unsigned variable : pattern.variables)
    part.dimensions.push_back({context_.instanceSharding(variable, building.exists[variable]), -1});
  FlatOffsets offsets;
  for (size_t t = 0; t < pattern.shape.size(); ++t) {
    const size_t f =
        std::find(tensor.permute.begin(), tensor.permute.end(), static_cast<int64_t>(t)) - tensor.permute.begin();
    part.dimensions.push_back({0, 0});
    offsets.push_back(spread(indexMaps[f], strides[f], f == 0 ? start : 0));
  }
  addCuts(part, FlatPart(std::move(offsets)), ranges, building.dimensions[0].axes, ranges.size(), context_,
          building.param.parts);
}

/// Adds zeros between the entries and behind the last one, within each rank's range.
void Params::addGaps(Building &building, const std::vector<FlatInterval> &ranges) const {
  std::vector<FlatInterval> gaps;
  int64_t next = 0;
  for (size_t e = 0; e < building.pack.of.size(); ++e) {
    int64_t size = 1;
    for (int64_t length : building.pack.of[e].shape)
      size *= length;
    if (next < building.pack.starts[e])
      gaps.push_back({next, building.pack.starts[e]});
    next = building.pack.starts[e] + size;
  }
  if (next < building.dimensions[0].padded)
    gaps.push_back({next, building.dimensions[0].padded});
  ir::Part part;
  for (unsigned sharding : building.param.instances)
    part.dimensions.push_back({sharding, -1});
  ir::Sharding zeros{building.dimensions[0].axes, {}};
  for (const FlatInterval &range : ranges) {
    IndexMap &local = zeros.at.emplace_back();
    for (const FlatInterval &gap : gaps)
      if (const int64_t from = std::max(gap.begin, range.begin), to = std::min(gap.end, range.end); from < to)
        local.push_back({from - range.begin, from - range.begin, to - from, 1, 0, 0});
  }
  if (gaps.empty())
    return;
  part.dimensions.push_back({context_.intern(std::move(zeros)), 0});
  building.param.parts.push_back(std::move(part));
}

} // namespace reshard
