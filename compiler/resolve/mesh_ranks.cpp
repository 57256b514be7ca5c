// SPDX-License-Identifier: Apache-2.0
#include "compiler/resolve/mesh_ranks.h"
#include "compiler/resolve/interner.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

namespace reshard {

namespace {

/// Sorts axes by stride, without repeats and axes of size 1.
std::vector<unsigned> reduced(const ir::Endpoint &endpoint, std::vector<unsigned> axes) {
  std::sort(axes.begin(), axes.end(), [&](unsigned a, unsigned b) {
    return std::pair(endpoint.axes[a].stride, a) < std::pair(endpoint.axes[b].stride, b);
  });
  axes.erase(std::unique(axes.begin(), axes.end()), axes.end());
  std::erase_if(axes, [&](unsigned axis) { return endpoint.axes[axis].size == 1; });
  return axes;
}

} // namespace

std::vector<int64_t> distinctMeshRanks(const ir::Endpoint &endpoint, std::vector<unsigned> axes) {
  axes = reduced(endpoint, std::move(axes));
  // Coordinates change at multiples of `step` and repeat after `end`, the least common multiple of the axes' periods:
  // for axes of different views it may exceed the longest period.
  int64_t step = 0, end = 1;
  for (unsigned axis : axes) {
    step = std::gcd(step, endpoint.axes[axis].stride);
    const int64_t period = endpoint.axes[axis].stride * endpoint.axes[axis].size;
    end = std::min(end / std::gcd(end, period) * period, endpoint.meshRanks());
  }
  std::vector<int64_t> meshRanks;
  std::unordered_set<std::vector<int64_t>, ValueHash> seen;
  for (int64_t meshRank = 0; meshRank < end; meshRank += std::max<int64_t>(step, 1)) {
    std::vector<int64_t> coordinates;
    coordinates.reserve(axes.size());
    for (unsigned axis : axes)
      coordinates.push_back(meshRank / endpoint.axes[axis].stride % endpoint.axes[axis].size);
    if (seen.insert(std::move(coordinates)).second)
      meshRanks.push_back(meshRank);
  }
  return meshRanks;
}

bool independent(const ir::Endpoint &endpoint, std::vector<unsigned> axes) {
  axes = reduced(endpoint, std::move(axes));
  for (size_t i = 1; i < axes.size(); ++i) {
    const ir::Axis &inner = endpoint.axes[axes[i - 1]], &outer = endpoint.axes[axes[i]];
    if (outer.stride % (inner.stride * inner.size) != 0)
      return false;
  }
  return true;
}

std::string meshRankText(const ir::Endpoint &endpoint, int64_t meshRank) {
  if (!endpoint.storage)
    return "rank " + std::to_string(endpoint.ranks[meshRank]);
  return (storesChunks(endpoint.format) ? "stored chunk " : "file ") + std::to_string(meshRank);
}

} // namespace reshard
