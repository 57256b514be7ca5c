// SPDX-License-Identifier: Apache-2.0
// The names of enumerators, and what follows from a layout alone: shapes, instances and names on a mesh rank.
#include "ir/ir.h"

#include <algorithm>
#include <array>

namespace reshard::ir {
namespace {

struct DTypeRow {
  const char *name;
  int64_t bytes;
};
constexpr std::array<DTypeRow, 15> kDTypes = {{{"bf16", 2},
                                               {"fp16", 2},
                                               {"fp32", 4},
                                               {"fp64", 8},
                                               {"fp8_e4m3", 1},
                                               {"fp8_e5m2", 1},
                                               {"i8", 1},
                                               {"i16", 2},
                                               {"i32", 4},
                                               {"i64", 8},
                                               {"u8", 1},
                                               {"u16", 2},
                                               {"u32", 4},
                                               {"u64", 8},
                                               {"bool", 1}}};

constexpr const char *kStepKinds[] = {"copy", "send", "recv", "fill", "reduce"};

} // namespace

int64_t itemBytes(DType type) { return kDTypes[static_cast<size_t>(type)].bytes; }
const char *name(DType type) { return kDTypes[static_cast<size_t>(type)].name; }
const char *name(StepKind kind) { return kStepKinds[static_cast<size_t>(kind)]; }

std::optional<DType> parseDType(const std::string &text) {
  for (size_t i = 0; i < kDTypes.size(); ++i)
    if (text == kDTypes[i].name)
      return static_cast<DType>(i);
  return std::nullopt;
}

int64_t coordinate(const Endpoint &endpoint, const std::vector<unsigned> &axes, int64_t meshRank) {
  int64_t combined = 0;
  for (unsigned axis : axes)
    combined = combined * endpoint.axes[axis].size + meshRank / endpoint.axes[axis].stride % endpoint.axes[axis].size;
  return combined;
}

namespace {

bool passes(const Endpoint &endpoint, const std::vector<Presence> &rules, int64_t meshRank) {
  return std::all_of(rules.begin(), rules.end(), [&](const Presence &rule) {
    return std::binary_search(rule.coordinates.begin(), rule.coordinates.end(),
                              coordinate(endpoint, {rule.axis}, meshRank));
  });
}

} // namespace

namespace {

template <class Value> std::optional<Value> parseNamed(const std::string &text, int count) {
  for (int i = 0; i < count; ++i)
    if (text == name(static_cast<Value>(i)))
      return static_cast<Value>(i);
  return std::nullopt;
}

} // namespace

const char *name(ViewKind kind) {
  const char *names[] = {"elements", "codes", "scales", "plain_scales", "amax"};
  return names[static_cast<int>(kind)];
}

std::optional<ViewKind> parseViewKind(const std::string &text) { return parseNamed<ViewKind>(text, 5); }

int64_t stagedBytes(const Layout &layout, const std::vector<BufferRange> &buffers) {
  int64_t bytes = 0;
  for (const BufferRange &range : buffers)
    if (layout.endpoints[range.endpoint].params[range.param].inArena())
      bytes += range.count * ((range.bytes + 63) / 64 * 64);
  return bytes;
}

bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  return passes(endpoint, param.presence, meshRank);
}

bool mayRead(const Endpoint &endpoint, int64_t meshRank) { return passes(endpoint, endpoint.authority, meshRank); }

int64_t instances(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  if (!present(endpoint, param, meshRank))
    return 0;
  int64_t count = 1;
  for (unsigned sharding : param.instances) {
    const Sharding &values = endpoint.shardings[sharding];
    count *= positionCount(values.at[coordinate(endpoint, values.axes, meshRank)]);
  }
  return count;
}

std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  std::vector<int64_t> shape;
  shape.reserve(param.shape.size());
  for (const Extent &extent : param.shape)
    shape.push_back(extent.at[coordinate(endpoint, extent.axes, meshRank)]);
  return shape;
}

int64_t localBytes(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  int64_t bytes = itemBytes(param.dtype);
  for (int64_t length : localShape(endpoint, param, meshRank))
    bytes *= length;
  return bytes;
}

std::string instanceName(const Layout &layout, const Endpoint &endpoint, const Param &param, int64_t meshRank,
                         int64_t instance) {
  std::vector<std::pair<std::string, std::string>> placeholders;
  for (size_t i = param.variables.size(); i-- > 0;) {
    const Sharding &sharding = endpoint.shardings[param.instances[i]];
    const IndexMap &values = sharding.at[coordinate(endpoint, sharding.axes, meshRank)];
    const int64_t count = positionCount(values);
    const int64_t value = map(inverse(values), instance % count);
    instance /= count;
    const unsigned variable = param.variables[i];
    const Sharding &positions = endpoint.shardings[endpoint.placement[variable]];
    const int64_t position = map(positions.at[coordinate(endpoint, positions.axes, meshRank)], value);
    placeholders.emplace_back("{" + layout.variables[variable].name + "}", std::to_string(value));
    placeholders.emplace_back("{" + layout.variables[variable].name + ".local}",
                              std::to_string(position % kModelChunkStride));
    placeholders.emplace_back("{" + layout.variables[variable].name + ".chunk}",
                              std::to_string(position / kModelChunkStride));
  }
  std::string result = param.name;
  for (const auto &[from, to] : placeholders)
    for (size_t at = result.find(from); at != std::string::npos; at = result.find(from, at + to.size()))
      result.replace(at, from.size(), to);
  return result;
}

const char *name(Exchange exchange) {
  const char *names[] = {"auto", "nodes", "p2p", "broadcast", "gather-rounds"};
  return names[static_cast<int>(exchange)];
}

std::optional<Exchange> parseExchange(const std::string &text) {
  for (const Exchange each :
       {Exchange::automatic, Exchange::nodes, Exchange::p2p, Exchange::broadcast, Exchange::gather_rounds})
    if (text == name(each))
      return each;
  return std::nullopt;
}

int64_t bytes(const Transfers &transfers, const Transfer &transfer) {
  const Overlap &overlap = transfers.overlaps[transfer.overlap];
  if (!transfer.cut())
    return overlap.bytes * transfer.count;
  return overlap.bytes / positionCount(transfers.relations[overlap.replicaGroups[0].relations[transfer.dimension]]) *
         (transfer.end - transfer.begin);
}

std::vector<std::vector<BufferRange>> buffers(const Layout &layout) {
  std::vector<std::vector<BufferRange>> result(layout.world);
  std::vector<uint32_t> next(layout.world, 1);
  for (unsigned e = 0; e < layout.endpoints.size(); ++e) {
    const Endpoint &endpoint = layout.endpoints[e];
    for (int64_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank) {
      std::vector<BufferRange> ranges;
      for (unsigned p = 0; p < endpoint.params.size(); ++p)
        if (const int64_t count = instances(endpoint, endpoint.params[p], meshRank); count > 0)
          ranges.push_back({e, static_cast<int32_t>(meshRank), p, 0, static_cast<uint32_t>(count),
                            localBytes(endpoint, endpoint.params[p], meshRank)});
      const int32_t first = endpoint.storage ? 0 : endpoint.ranks[meshRank];
      const int32_t end = endpoint.storage ? static_cast<int32_t>(layout.world) : first + 1;
      for (int32_t rank = first; rank < end; ++rank)
        for (BufferRange range : ranges) {
          range.first = next[rank];
          next[rank] += range.count;
          result[rank].push_back(range);
        }
    }
  }
  return result;
}

} // namespace reshard::ir
