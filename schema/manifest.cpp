// SPDX-License-Identifier: Apache-2.0
// The same rules as in the compiler, read from the manifest alone and written again, so that an error of the compiler
// is found.
#include "schema/manifest.h"

#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace reshard::schema {
namespace {

struct DTypeNames {
  const char *name, *safetensors;
  int64_t bytes;
};
constexpr DTypeNames kDTypes[] = {
    {"bf16", "BF16", 2},        {"fp16", "F16", 2},         {"fp32", "F32", 4}, {"fp64", "F64", 8},
    {"fp8_e4m3", "F8_E4M3", 1}, {"fp8_e5m2", "F8_E5M2", 1}, {"i8", "I8", 1},    {"i16", "I16", 2},
    {"i32", "I32", 4},          {"i64", "I64", 8},          {"u8", "U8", 1},    {"u16", "U16", 2},
    {"u32", "U32", 4},          {"u64", "U64", 8},          {"bool", "BOOL", 1}};
constexpr size_t kDTypeCount = std::size(kDTypes);

/// A name with the numbers of its placeholders: value(inside) of "{inside}", which stays if there is no number.
template <class Value> std::string filled(std::string_view name, Value value) {
  std::string text;
  text.reserve(name.size() + 8);
  while (true) {
    const size_t begin = name.find('{'), end = name.find('}', std::min(begin, name.size()));
    if (end == std::string_view::npos)
      return text.append(name);
    text.append(name.substr(0, begin));
    if (const std::optional<int64_t> number = value(name.substr(begin + 1, end - begin - 1))) {
      char digits[24];
      text.append(digits, std::to_chars(digits, digits + sizeof digits, *number).ptr);
    } else {
      text.append(name.substr(begin, end + 1 - begin));
    }
    name.remove_prefix(end + 1);
  }
}

} // namespace

int64_t itemBytes(DType type) { return kDTypes[static_cast<size_t>(type)].bytes; }
const char *dtypeName(DType type) { return kDTypes[static_cast<size_t>(type)].name; }
const char *safetensorsName(DType type) { return kDTypes[static_cast<size_t>(type)].safetensors; }

std::optional<DType> dtypeFromSafetensors(std::string_view name) {
  for (size_t i = 0; i < kDTypeCount; ++i)
    if (name == kDTypes[i].safetensors)
      return static_cast<DType>(i);
  return std::nullopt;
}

int64_t coordinate(const Endpoint &endpoint, const flatbuffers::Vector<uint32_t> *axes, int64_t meshRank) {
  int64_t combined = 0;
  for (size_t i = 0; i < sizeOf(axes); ++i) {
    const Axis *axis = endpoint.axes()->Get(axes->Get(i));
    combined = combined * static_cast<int64_t>(axis->size()) +
               meshRank / static_cast<int64_t>(axis->stride()) % static_cast<int64_t>(axis->size());
  }
  return combined;
}

int64_t IndexMap::size() const {
  int64_t total = 0;
  for (const IndexBlock *block = begin; block != end; ++block)
    total += block->length() * block->count();
  return total;
}

std::optional<int64_t> IndexMap::map(int64_t from) const {
  for (const IndexBlock *block = begin; block != end; ++block) {
    const int64_t offset = from - block->from();
    if (offset < 0)
      continue;
    const int64_t repetition = block->count() > 1 ? std::min(offset / block->from_step(), block->count() - 1) : 0;
    const int64_t within = offset - repetition * block->from_step();
    if (within < block->length())
      return block->to() + repetition * block->to_step() + within;
  }
  return std::nullopt;
}

IndexMap indexMap(const Endpoint &endpoint, const Sharding &sharding, int64_t meshRank) {
  const int64_t at = coordinate(endpoint, sharding.axes(), meshRank);
  const IndexBlock *data = reinterpret_cast<const IndexBlock *>(sharding.blocks()->Data());
  return {data + sharding.first()->Get(at), data + sharding.first()->Get(at + 1)};
}

bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  for (size_t i = 0; i < sizeOf(param.presence()); ++i) {
    const Presence *rule = param.presence()->Get(i);
    const Axis *axis = endpoint.axes()->Get(rule->axis());
    const uint64_t at = static_cast<uint64_t>(meshRank) / axis->stride() % axis->size();
    if (!std::binary_search(rule->coordinates()->begin(), rule->coordinates()->end(), at))
      return false;
  }
  return true;
}

int64_t instanceCount(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  if (!present(endpoint, param, meshRank))
    return 0;
  int64_t count = 1;
  for (size_t i = 0; i < sizeOf(param.instances()); ++i)
    count *= indexMap(endpoint, *endpoint.shardings()->Get(param.instances()->Get(i)), meshRank).size();
  return count;
}

std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  std::vector<int64_t> shape;
  for (size_t d = 0; d < sizeOf(param.shape()); ++d) {
    const Extent *extent = param.shape()->Get(d);
    shape.push_back(extent->at()->Get(coordinate(endpoint, extent->axes(), meshRank)));
  }
  return shape;
}

std::vector<ParamInstance> instances(const Manifest &manifest, const Endpoint &endpoint, uint32_t number,
                                     int64_t meshRank) {
  const Param &param = *endpoint.params()->Get(number);
  std::vector<ParamInstance> result;
  const int64_t count = instanceCount(endpoint, param, meshRank);
  if (count == 0)
    return result;
  const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
  int64_t bytes = itemBytes(storageDtypeOf(param));
  for (int64_t length : shape)
    bytes *= length;

  // For each name variable: its values on this mesh rank by instance number, and their positions in its placement.
  struct Values {
    std::string_view name;
    std::vector<int64_t> value, position;
  };
  std::vector<Values> variables;
  for (size_t i = 0; i < sizeOf(param.instances()); ++i) {
    const uint32_t variable = param.variables()->Get(i);
    Values values{manifest.variables()->Get(variable)->name()->string_view(), {}, {}};
    const IndexMap here = indexMap(endpoint, *endpoint.shardings()->Get(param.instances()->Get(i)), meshRank);
    const IndexMap placed =
        indexMap(endpoint, *endpoint.shardings()->Get(endpoint.placement()->Get(variable)), meshRank);
    values.value.resize(here.size());
    for (const IndexBlock *block = here.begin; block != here.end; ++block)
      for (int64_t repetition = 0; repetition < block->count(); ++repetition)
        for (int64_t k = 0; k < block->length(); ++k)
          values.value[block->to() + repetition * block->to_step() + k] =
              block->from() + repetition * block->from_step() + k;
    for (int64_t value : values.value)
      values.position.push_back(placed.map(value).value_or(-1));
    variables.push_back(std::move(values));
  }
  result.reserve(count);
  for (int64_t n = 0; n < count; ++n) {
    ParamInstance instance{number, static_cast<uint32_t>(n), std::vector<int64_t>(variables.size()), {}, shape, bytes};
    std::vector<int64_t> positions(variables.size());
    int64_t rest = n;
    for (size_t v = variables.size(); v-- > 0;) {
      const Values &values = variables[v];
      const size_t at = rest % values.value.size();
      rest /= static_cast<int64_t>(values.value.size());
      instance.values[v] = values.value[at];
      positions[v] = values.position[at];
    }
    instance.name = filled(param.name()->string_view(), [&](std::string_view inside) -> std::optional<int64_t> {
      for (size_t v = 0; v < variables.size(); ++v)
        if (inside.starts_with(variables[v].name)) {
          const std::string_view form = inside.substr(variables[v].name.size());
          if (form.empty())
            return instance.values[v];
          if (form == ".local")
            return positions[v] % kChunkStride;
          if (form == ".chunk")
            return positions[v] / kChunkStride;
        }
      return std::nullopt;
    });
    result.push_back(std::move(instance));
  }
  return result;
}

std::string tensorName(const Manifest &manifest, const TensorPattern &pattern, const std::vector<int64_t> &values) {
  return filled(pattern.name()->string_view(), [&](std::string_view inside) -> std::optional<int64_t> {
    for (size_t v = 0; v < values.size(); ++v)
      if (manifest.variables()->Get(pattern.variables()->Get(v))->name()->string_view() == inside)
        return values[v];
    return std::nullopt;
  });
}

} // namespace reshard::schema
