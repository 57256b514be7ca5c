#include "compiler/views.h"

#include <algorithm>

namespace reshard {

using namespace ir;

unsigned Views::number(unsigned share, int64_t coordinate) {
  if (numbers_.empty())
    numbers_.resize(endpoint_.shares.size());
  std::vector<int64_t> &known = numbers_[share];
  if (known.empty())
    known.assign(endpoint_.shares[share].at.size(), -1);
  if (known[coordinate] < 0)
    known[coordinate] = segments_.intern(endpoint_.shares[share].at[coordinate]);
  return static_cast<unsigned>(known[coordinate]);
}

std::vector<View> Views::of(unsigned paramNumber, unsigned partNumber) {
  const Param &param = endpoint_.params[paramNumber];
  const Part &part = param.parts[partNumber];

  // A view depends on the coordinates of these axes alone; look at each combination of them once.
  std::vector<unsigned> axes;
  auto use = [&](unsigned axis) {
    if (endpoint_.axes[axis].size > 1 && std::find(axes.begin(), axes.end(), axis) == axes.end())
      axes.push_back(axis);
  };
  for (const PartDimension &dimension : part.dimensions)
    for (unsigned axis : endpoint_.shares[dimension.share].axes)
      use(axis);
  for (unsigned share : param.instances)
    for (unsigned axis : endpoint_.shares[share].axes)
      use(axis);
  for (const Extent &extent : param.shape)
    for (unsigned axis : extent.axes)
      use(axis);
  for (const Presence &rule : param.presence)
    use(rule.axis);

  constexpr int kUnknown = -1, kNothing = -2;
  Interner<std::vector<int64_t>> contents; // by view
  std::vector<View> views;
  auto viewOf = [&](int64_t place) {
    if (instances(endpoint_, param, place) == 0)
      return kNothing;
    std::vector<int64_t> key;
    key.reserve(part.dimensions.size() + param.shape.size());
    for (const PartDimension &dimension : part.dimensions) {
      const Share &share = endpoint_.shares[dimension.share];
      const unsigned id = number(dimension.share, coordinate(endpoint_, share.axes, place));
      if (segments_[id].empty())
        return kNothing;
      key.push_back(id);
    }
    const size_t dimensions = key.size();
    for (int64_t length : localShape(endpoint_, param, place))
      key.push_back(length);
    const unsigned number = contents.intern(std::move(key));
    if (number == views.size()) {
      const std::vector<int64_t> &content = contents[number];
      views.push_back({paramNumber, partNumber, {content.begin(), content.begin() + dimensions}, {}});
    }
    return static_cast<int>(number);
  };

  // Combinations of axes in several views may be more than there are places; then ask for each place.
  int64_t combinations = 1;
  for (unsigned axis : axes)
    combinations = std::min(combinations * endpoint_.axes[axis].size, endpoint_.places() + 1);
  std::vector<int> known(combinations <= endpoint_.places() ? combinations : 0, kUnknown);
  for (int64_t place = 0; place < endpoint_.places(); ++place) {
    int view = kUnknown;
    if (known.empty()) {
      view = viewOf(place);
    } else {
      int &cached = known[coordinate(endpoint_, axes, place)];
      if (cached == kUnknown)
        cached = viewOf(place);
      view = cached;
    }
    if (view >= 0)
      views[view].places.push_back(static_cast<int32_t>(place));
  }
  return views;
}

InstanceBases::InstanceBases(const Endpoint &endpoint)
    : params_(endpoint.params.size()), bases_(endpoint.places() * params_) {
  for (int64_t place = 0; place < endpoint.places(); ++place) {
    uint32_t next = 0;
    for (size_t param = 0; param < params_; ++param) {
      bases_[place * params_ + param] = next;
      next += static_cast<uint32_t>(instances(endpoint, endpoint.params[param], place));
    }
  }
}

} // namespace reshard
