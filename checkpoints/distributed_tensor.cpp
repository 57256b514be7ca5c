// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/distributed_tensor.h"

#include <algorithm>

namespace reshard::checkpoints {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kRebuildWrapper = "torch._utils _rebuild_wrapper_subclass";
constexpr std::string_view kGetLayout = "torch.serialization _get_layout";

bool isGlobal(const Pickle &pickle, Value value, std::string_view global) {
  return pickle.is(value, Kind::global) && pickle.text(value) == global;
}

/// Whether a value is _get_layout('torch.strided').
bool isStrided(const Pickle &pickle, Value layout) {
  const Pickle::Items arguments =
      pickle.isObject(layout, kGetLayout) ? pickle.items(pickle.items(layout)[1]) : Pickle::Items();
  return arguments.size() == 1 && pickle.is(arguments[0], Kind::text) && pickle.text(arguments[0]) == "torch.strided";
}

} // namespace

std::vector<int64_t> LocalPart::localShape() const {
  std::vector<int64_t> lengths;
  lengths.reserve(positions.size());
  for (const std::vector<IndexRange> &intervals : positions) {
    int64_t length = 0;
    for (const IndexRange &each : intervals)
      length += each.length;
    lengths.push_back(length);
  }
  return lengths;
}

std::vector<std::string_view> distributedGlobals() {
  std::vector<std::string_view> all = {kRebuildFromType, kRebuildWrapper, kGetLayout, "torch device"};
  all.insert(all.end(), dtensorGlobals().begin(), dtensorGlobals().end());
  all.insert(all.end(), shardedTensorGlobals().begin(), shardedTensorGlobals().end());
  return all;
}

bool onlyDescribes(const Pickle &pickle, Value state) {
  if (pickle.is(state, Kind::tuple)) {
    const Pickle::Items items = pickle.items(state);
    return items.size() == 2 && !pickle.is(items[0], Kind::tuple) && !pickle.is(items[1], Kind::tuple) &&
           onlyDescribes(pickle, items[0]) && onlyDescribes(pickle, items[1]);
  }
  if (pickle.is(state, Kind::none))
    return true;
  const Pickle::Items entries = pickle.items(state);
  for (size_t i = 0; i + 1 < entries.size(); i += 2)
    if (const std::string_view key = pickle.text(entries[i]);
        !pickle.is(entries[i], Kind::text) || key == "data" || key == "real" || key == "imag")
      return false;
  return pickle.is(state, Kind::dictionary);
}

bool isDistributed(const Pickle &pickle, Value value) {
  if (!pickle.isObject(value, kRebuildFromType))
    return false;
  const Pickle::Items arguments = pickle.items(pickle.items(value)[1]);
  return !arguments.empty() && isGlobal(pickle, arguments[0], kRebuildWrapper);
}

std::string readDistributed(const Pickle &pickle, Value value, DistributedTensor &found, ReadBudget &budget) {
  // _rebuild_from_type_v2(_rebuild_wrapper_subclass, class,
  //                       (class, dtype, shape, strides, offset, layout, device, requires_grad), state)
  const auto is = [&](Value item, std::string_view global) { return isGlobal(pickle, item, global); };
  const Pickle::Items arguments = pickle.items(pickle.items(value)[1]);
  if (arguments.size() != 4 || (!is(arguments[1], kDTensor) && !is(arguments[1], kShardedTensor)))
    return "it is a tensor of another class than DTensor and ShardedTensor";
  constexpr size_t kArguments = 8;
  const Pickle::Items wrapper = pickle.items(arguments[2]);
  if (!pickle.is(arguments[2], Kind::tuple) || wrapper.size() != kArguments || pickle.state(value) ||
      !pickle.is(wrapper[0], Kind::global) || pickle.text(wrapper[0]) != pickle.text(arguments[1]))
    return "'torch._utils._rebuild_wrapper_subclass' does not have the " + std::to_string(kArguments) +
           " arguments of PyTorch 2.13";
  if (!isStrided(pickle, wrapper[5]))
    return "its layout is not torch.strided";
  const Value dtype = wrapper[1];
  const auto shape = pickle.integers(wrapper[2]);
  if (!pickle.is(dtype, Kind::global) || !shape ||
      std::any_of(shape->begin(), shape->end(), [](int64_t length) { return length < 0; }))
    return "it has no dtype or no shape";
  found.dtype = pickle.text(dtype);
  found.part.shape = *shape;
  for (const int64_t length : *shape)
    found.part.positions.push_back(length > 0 ? std::vector<IndexRange>{{0, length}} : std::vector<IndexRange>{});
  return is(arguments[1], kDTensor) ? readDTensor(pickle, arguments[3], found, budget)
                                    : readShardedTensor(pickle, arguments[3], found);
}

} // namespace reshard::checkpoints
