#include "schema/manifest.h"

#include <algorithm>

namespace reshard::schema {
namespace {

struct DTypeRow {
  const char *name, *safetensors;
  int64_t bytes;
};
constexpr DTypeRow kDTypes[] = {
    {"bf16", "BF16", 2},        {"fp16", "F16", 2},         {"fp32", "F32", 4}, {"fp64", "F64", 8},
    {"fp8_e4m3", "F8_E4M3", 1}, {"fp8_e5m2", "F8_E5M2", 1}, {"i8", "I8", 1},    {"i16", "I16", 2},
    {"i32", "I32", 4},          {"i64", "I64", 8},          {"u8", "U8", 1},    {"u16", "U16", 2},
    {"u32", "U32", 4},          {"u64", "U64", 8},          {"bool", "BOOL", 1}};
constexpr size_t kDTypeCount = std::size(kDTypes);

template <class T> size_t sizeOf(const flatbuffers::Vector<T> *vector) { return vector ? vector->size() : 0; }

void fill(std::string &text, const std::string &placeholder, int64_t value) {
  const std::string number = std::to_string(value);
  for (size_t at = text.find(placeholder); at != std::string::npos; at = text.find(placeholder, at + number.size()))
    text.replace(at, placeholder.size(), number);
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

int64_t coordinate(const Endpoint &endpoint, const flatbuffers::Vector<uint32_t> *axes, int64_t place) {
  int64_t combined = 0;
  for (size_t i = 0; i < sizeOf(axes); ++i) {
    const Axis *axis = endpoint.axes()->Get(axes->Get(i));
    combined = combined * static_cast<int64_t>(axis->size()) +
               place / static_cast<int64_t>(axis->stride()) % static_cast<int64_t>(axis->size());
  }
  return combined;
}

int64_t Runs::size() const {
  int64_t total = 0;
  for (const Run *run = begin; run != end; ++run)
    total += run->length() * run->count();
  return total;
}

std::optional<int64_t> Runs::map(int64_t from) const {
  for (const Run *run = begin; run != end; ++run) {
    const int64_t offset = from - run->from();
    if (offset < 0)
      continue;
    const int64_t block = run->count() > 1 ? std::min(offset / run->from_step(), run->count() - 1) : 0;
    const int64_t within = offset - block * run->from_step();
    if (within < run->length())
      return run->to() + block * run->to_step() + within;
  }
  return std::nullopt;
}

Runs runs(const Endpoint &endpoint, const Share &share, int64_t place) {
  const int64_t at = coordinate(endpoint, share.axes(), place);
  const Run *data = reinterpret_cast<const Run *>(share.runs()->Data());
  return {data + share.first()->Get(at), data + share.first()->Get(at + 1)};
}

bool present(const Endpoint &endpoint, const Param &param, int64_t place) {
  for (size_t i = 0; i < sizeOf(param.presence()); ++i) {
    const Presence *rule = param.presence()->Get(i);
    const Axis *axis = endpoint.axes()->Get(rule->axis());
    const uint64_t at = static_cast<uint64_t>(place) / axis->stride() % axis->size();
    if (!std::binary_search(rule->coordinates()->begin(), rule->coordinates()->end(), at))
      return false;
  }
  return true;
}

int64_t instanceCount(const Endpoint &endpoint, const Param &param, int64_t place) {
  if (!present(endpoint, param, place))
    return 0;
  int64_t count = 1;
  for (size_t i = 0; i < sizeOf(param.instances()); ++i)
    count *= runs(endpoint, *endpoint.shares()->Get(param.instances()->Get(i)), place).size();
  return count;
}

std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t place) {
  std::vector<int64_t> shape;
  for (size_t d = 0; d < sizeOf(param.shape()); ++d) {
    const Extent *extent = param.shape()->Get(d);
    shape.push_back(extent->at()->Get(coordinate(endpoint, extent->axes(), place)));
  }
  return shape;
}

std::vector<ParamInstance> instances(const Manifest &manifest, const Endpoint &endpoint, uint32_t number,
                                     int64_t place) {
  const Param &param = *endpoint.params()->Get(number);
  std::vector<ParamInstance> result;
  const int64_t count = instanceCount(endpoint, param, place);
  if (count == 0)
    return result;
  const std::vector<int64_t> shape = localShape(endpoint, param, place);
  int64_t bytes = itemBytes(storedType(param));
  for (int64_t length : shape)
    bytes *= length;

  // Per name variable: its values here, ascending by instance number, and their positions among all values placed here.
  struct Values {
    std::string global, local, chunk;
    std::vector<int64_t> value, position;
  };
  std::vector<Values> variables;
  for (size_t i = 0; i < sizeOf(param.instances()); ++i) {
    const uint32_t variable = param.variables()->Get(i);
    const std::string name = manifest.variables()->Get(variable)->name()->str();
    Values values{"{" + name + "}", "{" + name + ".local}", "{" + name + ".chunk}", {}, {}};
    const Runs here = runs(endpoint, *endpoint.shares()->Get(param.instances()->Get(i)), place);
    const Runs placed = runs(endpoint, *endpoint.shares()->Get(endpoint.placement()->Get(variable)), place);
    values.value.resize(here.size());
    for (const Run *run = here.begin; run != here.end; ++run)
      for (int64_t block = 0; block < run->count(); ++block)
        for (int64_t k = 0; k < run->length(); ++k)
          values.value[run->to() + block * run->to_step() + k] = run->from() + block * run->from_step() + k;
    for (int64_t value : values.value)
      values.position.push_back(placed.map(value).value_or(-1));
    variables.push_back(std::move(values));
  }
  result.reserve(count);
  for (int64_t n = 0; n < count; ++n) {
    ParamInstance instance{
        number, static_cast<uint32_t>(n), std::vector<int64_t>(variables.size()), param.name()->str(), shape, bytes};
    int64_t rest = n;
    for (size_t v = variables.size(); v-- > 0;) {
      const Values &values = variables[v];
      const size_t at = rest % values.value.size();
      rest /= static_cast<int64_t>(values.value.size());
      instance.values[v] = values.value[at];
      fill(instance.name, values.global, values.value[at]);
      fill(instance.name, values.local, values.position[at] % kChunk);
      fill(instance.name, values.chunk, values.position[at] / kChunk);
    }
    result.push_back(std::move(instance));
  }
  return result;
}

std::string tensorName(const Manifest &manifest, const Family &family, const std::vector<int64_t> &values) {
  std::string name = family.name()->str();
  for (size_t v = 0; v < values.size(); ++v)
    fill(name, "{" + manifest.variables()->Get(family.variables()->Get(v))->name()->str() + "}", values[v]);
  return name;
}

} // namespace reshard::schema
