// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/rank_classes.h"

#include <algorithm>

namespace reshard {

using namespace ir;

PositionClasses::PositionClasses(const Endpoint &endpoint, const EndpointCopies &copies, Interner<IndexMap> &indexMaps)
    : endpoint_(endpoint), indexMaps_(indexMaps) {
  for (int32_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank)
    if (copies.first(meshRank) == meshRank)
      meshRanks_.push_back(meshRank);
}

unsigned PositionClasses::number(unsigned sharding, int64_t coordinate) {
  if (numbers_.empty())
    numbers_.resize(endpoint_.shardings.size());
  std::vector<int64_t> &known = numbers_[sharding];
  if (known.empty())
    known.assign(endpoint_.shardings[sharding].at.size(), -1);
  if (known[coordinate] < 0)
    known[coordinate] = indexMaps_.intern(endpoint_.shardings[sharding].at[coordinate]);
  return static_cast<unsigned>(known[coordinate]);
}

std::vector<unsigned> PositionClasses::axesOf(const Param &param, const Part &part) const {
  std::vector<unsigned> axes;
  auto use = [&](unsigned axis) {
    if (endpoint_.axes[axis].size > 1 && std::find(axes.begin(), axes.end(), axis) == axes.end())
      axes.push_back(axis);
  };
  for (const PartDimension &dimension : part.dimensions)
    for (unsigned axis : endpoint_.shardings[dimension.sharding].axes)
      use(axis);
  for (unsigned sharding : param.instances)
    for (unsigned axis : endpoint_.shardings[sharding].axes)
      use(axis);
  for (const Extent &extent : param.shape)
    for (unsigned axis : extent.axes)
      use(axis);
  for (const Presence &rule : param.presence)
    use(rule.axis);
  return axes;
}

std::vector<PositionClass> PositionClasses::of(unsigned paramNumber, unsigned partNumber) {
  const Param &param = endpoint_.params[paramNumber];
  const Part &part = param.parts[partNumber];

  constexpr int kUnknown = -1, kNothing = -2;
  Interner<std::vector<int64_t>> contents; // by rank class
  std::vector<PositionClass> rankClasses;
  auto classOf = [&](int64_t meshRank) {
    if (instances(endpoint_, param, meshRank) == 0)
      return kNothing;
    std::vector<int64_t> key;
    key.reserve(part.dimensions.size() + param.shape.size());
    for (const PartDimension &dimension : part.dimensions) {
      const Sharding &sharding = endpoint_.shardings[dimension.sharding];
      const unsigned id = number(dimension.sharding, coordinate(endpoint_, sharding.axes, meshRank));
      if (indexMaps_[id].empty())
        return kNothing;
      key.push_back(id);
    }
    const size_t dimensions = key.size();
    for (int64_t length : localShape(endpoint_, param, meshRank))
      key.push_back(length);
    const unsigned number = contents.intern(std::move(key));
    if (number == rankClasses.size()) {
      const std::vector<int64_t> &content = contents[number];
      rankClasses.push_back({paramNumber, partNumber, {content.begin(), content.begin() + dimensions}, {}});
    }
    return static_cast<int>(number);
  };

  // The class of a mesh rank depends on its coordinates along these axes only: compute it once for each combination.
  // Axes of several views of the mesh can have more combinations than the mesh has ranks. Then compute the class of
  // each mesh rank instead.
  const std::vector<unsigned> axes = axesOf(param, part);
  int64_t combinations = 1;
  for (unsigned axis : axes)
    combinations = std::min(combinations * endpoint_.axes[axis].size, endpoint_.meshRanks() + 1);
  std::vector<int> known(combinations <= endpoint_.meshRanks() ? combinations : 0, kUnknown);
  for (const int32_t meshRank : meshRanks_) {
    int rankClass = kUnknown;
    if (known.empty()) {
      rankClass = classOf(meshRank);
    } else {
      int &cached = known[coordinate(endpoint_, axes, meshRank)];
      if (cached == kUnknown)
        cached = classOf(meshRank);
      rankClass = cached;
    }
    if (rankClass >= 0)
      rankClasses[rankClass].meshRanks.push_back(meshRank);
  }
  return rankClasses;
}

InstanceBases::InstanceBases(const Endpoint &endpoint)
    : params_(endpoint.params.size()), bases_(endpoint.meshRanks() * params_) {
  for (int64_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank) {
    uint32_t next = 0;
    for (size_t param = 0; param < params_; ++param) {
      bases_[meshRank * params_ + param] = next;
      next += static_cast<uint32_t>(instances(endpoint, endpoint.params[param], meshRank));
    }
  }
}

} // namespace reshard
