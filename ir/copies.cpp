// SPDX-License-Identifier: Apache-2.0
// Writes mesh ranks as numbers with one digit for each axis. The digits on which no param depends number the copies.
#include "ir/copies.h"

#include <algorithm>
#include <numeric>

namespace reshard::ir {

int64_t EndpointCopies::count() const {
  int64_t count = 1;
  for (const Digit &digit : digits_)
    count *= digit.size;
  return count;
}

int32_t EndpointCopies::first(int32_t meshRank) const {
  int64_t first = meshRank;
  for (const Digit &digit : digits_)
    first -= meshRank / digit.stride % digit.size * digit.stride;
  return static_cast<int32_t>(first);
}

int32_t EndpointCopies::meshRank(int32_t first, int64_t copy) const {
  int64_t meshRank = first;
  for (const Digit &digit : digits_) {
    meshRank += copy % digit.size * digit.stride;
    copy /= digit.size;
  }
  return static_cast<int32_t>(meshRank);
}

int64_t EndpointCopies::copy(int32_t meshRank) const {
  int64_t copy = 0, copies = 1;
  for (const Digit &digit : digits_) {
    copy += meshRank / digit.stride % digit.size * copies;
    copies *= digit.size;
  }
  return copy;
}

namespace {

/// The axes of size > 1 on which the contents of mesh ranks depend.
class UsedAxes {
public:
  explicit UsedAxes(const Endpoint &endpoint) : endpoint_(endpoint), used_(endpoint.axes.size()) {}
  void add(const std::vector<unsigned> &axes) {
    for (unsigned axis : axes)
      used_[axis] = endpoint_.axes[axis].size > 1;
  }
  void add(const std::vector<Presence> &rules) {
    for (const Presence &rule : rules)
      used_[rule.axis] = endpoint_.axes[rule.axis].size > 1;
  }
  void addSharding(unsigned sharding) { add(endpoint_.shardings[sharding].axes); }
  void add(const Param &param) {
    for (unsigned sharding : param.instances)
      addSharding(sharding);
    add(param.presence);
    for (const Extent &extent : param.shape)
      add(extent.axes);
    for (const Part &part : param.parts)
      for (const PartDimension &dimension : part.dimensions)
        addSharding(dimension.sharding);
  }
  const std::vector<bool> &used() const { return used_; }

private:
  const Endpoint &endpoint_;
  std::vector<bool> used_;
};

/// The digits of mesh ranks between the used axes, by ascending strides.
std::vector<Digit> freeDigits(const Endpoint &endpoint, const std::vector<bool> &used) {
  std::vector<std::pair<int64_t, int64_t>> taken = {
      {endpoint.meshRanks(), endpoint.meshRanks()}}; // strides [begin, end)
  for (size_t axis = 0; axis < used.size(); ++axis)
    if (used[axis])
      taken.emplace_back(endpoint.axes[axis].stride, endpoint.axes[axis].stride * endpoint.axes[axis].size);
  std::sort(taken.begin(), taken.end());
  std::vector<Digit> digits;
  int64_t stride = 1;
  for (const auto &[begin, end] : taken) {
    if (begin > endpoint.meshRanks())
      break;
    // Each axis below must repeat in the stride, and the stride and size in each axis above.
    const bool whole =
        begin > stride && begin % stride == 0 && std::all_of(taken.begin(), taken.end(), [&](const auto &each) {
          return each.second <= stride ? stride % each.second == 0 : each.first % begin == 0;
        });
    if (whole)
      digits.push_back({stride, begin / stride});
    stride = std::max(stride, end);
  }
  return digits;
}

std::vector<Digit> freeDigits(const Endpoint &endpoint) {
  UsedAxes axes(endpoint);
  for (unsigned sharding : endpoint.placement)
    axes.addSharding(sharding);
  axes.add(endpoint.authority);
  for (const Param &param : endpoint.params)
    axes.add(param);
  return freeDigits(endpoint, axes.used());
}

/// Whether mesh ranks hold replicas of each other's elements, more than a negligible part of their bytes (some layouts
/// replicate a few small params). Mesh rank 0 stands for all.
bool hasReplicas(const Endpoint &endpoint) {
  constexpr int64_t kNegligible = 64;
  int64_t all = 0, replicated = 0;
  for (const Param &param : endpoint.params) {
    const int64_t count = instances(endpoint, param, 0), bytes = count > 0 ? count * localBytes(endpoint, param, 0) : 0;
    UsedAxes axes(endpoint);
    axes.add(param);
    all += bytes;
    replicated += freeDigits(endpoint, axes.used()).empty() ? 0 : bytes;
  }
  return replicated > all / kNegligible;
}

int64_t product(const std::vector<Digit> &digits) { return EndpointCopies(digits).count(); }

/// Parts of the digits whose product is `count`, a divisor of theirs: the outermost.
std::vector<Digit> outermost(const std::vector<Digit> &digits, int64_t count) {
  std::vector<Digit> result;
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    const int64_t size = std::gcd(digit->size, count);
    if (size > 1)
      result.push_back({digit->stride * (digit->size / size), size});
    count /= size;
  }
  std::reverse(result.begin(), result.end());
  return result;
}

bool canFold(const Layout &layout) {
  if (!layout.foldsCopies || layout.endpoints.size() != 2 || layout.topology.ranksPerNode > 0 || layout.pool())
    return false;
  std::vector<int32_t> ranks;
  for (const Endpoint &endpoint : layout.endpoints) {
    if (endpoint.storage || !endpoint.epochs.empty() ||
        std::any_of(endpoint.params.begin(), endpoint.params.end(),
                    [](const Param &param) { return param.view || param.derived; }))
      return false;
    ranks.insert(ranks.end(), endpoint.ranks.begin(), endpoint.ranks.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
}

} // namespace

Copies::Copies(const Layout &layout) {
  if (!canFold(layout))
    return;
  const std::vector<Digit> source = freeDigits(layout.endpoints[0]), target = freeDigits(layout.endpoints[1]);
  const int64_t both = std::gcd(product(source), product(target));
  source_ = EndpointCopies(outermost(source, both));
  target_ = EndpointCopies(hasReplicas(layout.endpoints[0]) ? outermost(target, both) : target);
}

} // namespace reshard::ir
