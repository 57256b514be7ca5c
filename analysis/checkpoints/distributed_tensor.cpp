// SPDX-License-Identifier: Apache-2.0
#include "analysis/checkpoints/distributed_tensor.h"

#include "analysis/checkpoints/dtensor.h"
#include "analysis/checkpoints/sharded_tensor.h"

#include <algorithm>

namespace reshard::analysis {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kRebuildWrapper = "torch._utils _rebuild_wrapper_subclass";

bool isGlobal(const Pickle &pickle, Value value, std::string_view global) {
  return pickle.is(value, Kind::global) && pickle.text(value) == global;
}

} // namespace

std::vector<int64_t> LocalPart::localShape() const {
  std::vector<int64_t> lengths;
  lengths.reserve(positions.size());
  for (const std::vector<Interval> &intervals : positions) {
    int64_t length = 0;
    for (const Interval &each : intervals)
      length += each.length;
    lengths.push_back(length);
  }
  return lengths;
}

std::vector<std::string_view> distributedGlobals() {
  std::vector<std::string_view> all = {kRebuildFromType, kRebuildWrapper, "torch.serialization _get_layout",
                                       "torch device"};
  all.insert(all.end(), dtensorGlobals().begin(), dtensorGlobals().end());
  all.insert(all.end(), shardedTensorGlobals().begin(), shardedTensorGlobals().end());
  return all;
}

bool isDistributed(const Pickle &pickle, Value value) {
  if (!pickle.isObject(value, kRebuildFromType))
    return false;
  const Pickle::Items arguments = pickle.items(pickle.items(value)[1]);
  return !arguments.empty() && isGlobal(pickle, arguments[0], kRebuildWrapper);
}

std::string readDistributed(const Pickle &pickle, Value value, DistributedTensor &found) {
  // _rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, shape, …), state)
  const auto is = [&](Value item, std::string_view global) { return isGlobal(pickle, item, global); };
  const Pickle::Items arguments = pickle.items(pickle.items(value)[1]);
  if (arguments.size() != 4 || !pickle.is(arguments[2], Kind::tuple) || pickle.items(arguments[2]).size() < 3 ||
      (!is(arguments[1], kDTensor) && !is(arguments[1], kShardedTensor)))
    return "it is a tensor of another class than DTensor and ShardedTensor";
  const Value dtype = pickle.items(arguments[2])[1];
  const auto shape = pickle.integers(pickle.items(arguments[2])[2]);
  if (!pickle.is(dtype, Kind::global) || !shape ||
      std::any_of(shape->begin(), shape->end(), [](int64_t length) { return length < 0; }))
    return "it has no dtype or no shape";
  found.dtype = pickle.text(dtype);
  found.part.shape = *shape;
  for (const int64_t length : *shape)
    found.part.positions.push_back(length > 0 ? std::vector<Interval>{{0, length}} : std::vector<Interval>{});
  return is(arguments[1], kDTensor) ? readDTensor(pickle, arguments[3], found)
                                    : readShardedTensor(pickle, arguments[3], found);
}

} // namespace reshard::analysis
