// SPDX-License-Identifier: Apache-2.0
// Synthesizes values from a seed, a tensor and an index, as elements or as codes and scales.
#include "verify/check/synthesize.h"

#include "executor/memory/view_jobs.h"
#include "kernels/cpu/convert.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/check/tensor_instances.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

namespace reshard::verify {

using namespace schema;

namespace {

uint64_t finish(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class Element> void fillRange(std::byte *memory, const ElementRange &range, uint64_t key) {
  auto *out = reinterpret_cast<Element *>(memory) + range.local;
  for (int64_t k = 0; k < range.count; ++k)
    out[k * range.localStep] =
        static_cast<Element>(elementHash(key, static_cast<uint64_t>(range.logical + k * range.logicalStep)));
}

/// Identifies one matrix of an instance of elements by the first of its tensors, and by this tensor's values of index
/// variables and positions in the dimensions that number matrices: equal for all parts of the matrix, and for all
/// params that hold it. `at`: its positions in these dimensions of the param.
uint64_t matrixKey(const InstanceLayout &elements, const std::vector<int64_t> &at) {
  const Param &param = *elements.endpoint.params()->Get(elements.instance.param);
  std::map<int, uint64_t> keys; // by pattern
  for (const Part *part : orEmpty(param.parts())) {
    if (part->pattern() < 0)
      continue;
    const TensorPattern &pattern = *elements.manifest.tensor_patterns()->Get(static_cast<uint32_t>(part->pattern()));
    uint64_t key = elementHash(0, static_cast<uint64_t>(part->pattern()));
    bool held = true;
    for (uint32_t d = 0; d < part->dimensions()->size(); ++d) {
      const PartDimension &dimension = *part->dimensions()->Get(d);
      const auto along = static_cast<size_t>(dimension.param());
      std::optional<int64_t> position;
      if (dimension.param() < 0) {
        for (size_t v = 0; v < elements.instance.values.size(); ++v)
          if (param.variables()->Get(static_cast<uint32_t>(v)) == pattern.variables()->Get(d))
            position = elements.instance.values[v];
      } else if (along < at.size()) {
        const IndexMap map =
            indexMap(elements.endpoint, *elements.endpoint.shardings()->Get(dimension.sharding()), elements.meshRank);
        for (const IndexBlock *block = map.begin; block != map.end; ++block)
          for (int64_t repetition = 0; repetition < block->count(); ++repetition)
            if (const int64_t offset = at[along] - block->to() - repetition * block->to_step();
                offset >= 0 && offset < block->length())
              position = block->from() + repetition * block->from_step() + offset;
        held = held && position;
      }
      if (position)
        key = elementHash(key, static_cast<uint64_t>(*position));
    }
    if (held)
      keys.emplace(part->pattern(), key);
  }
  return keys.empty() ? 0 : keys.begin()->second;
}

/// The tensor scales of the matrices that an instance of elements holds: they have an amax of 2 to 4, which is greater
/// than all synthesized values; the same for all parts of a matrix. Empty if the format has no tensor scales.
std::vector<float> tensorScales(const InstanceLayout &elements) {
  const kernels::Quantized matrices =
      ViewJobs::matricesOf(elements.endpoint, elements.instance.param, elements.meshRank);
  if (!reshard::formatOf(matrices.format).tensorScale())
    return {};
  std::vector<int64_t> shape = elements.instance.shape;
  shape.resize(shape.size() - 2);
  std::vector<float> scales;
  for (uint64_t matrix = 0; matrix < matrices.matrices; ++matrix) {
    std::vector<int64_t> at(shape.size());
    auto rest = static_cast<int64_t>(matrix);
    for (size_t d = shape.size(); d-- > 0; rest /= shape[d])
      at[d] = rest % shape[d];
    scales.push_back(tensorScaleOf(2 + static_cast<float>(elementHash(matrixKey(elements, at), 0) % 1024) / 512));
  }
  return scales;
}

kernels::Overflow overflowOf(const Param &param) {
  return param.overflow() == schema::OverflowRule::saturate ? kernels::Overflow::saturate : kernels::Overflow::infinity;
}

/// The format of a dtype that can be cast.
kernels::NumberFormat castFormat(DType dtype) { return kernels::numberFormatNamed(dtypeName(dtype)).value(); }

} // namespace

PlanConversions::PlanConversions(const Manifest &manifest) {
  for (const Endpoint *endpoint : *manifest.endpoints())
    for (const Param *param : orEmpty(endpoint->params())) {
      cast = cast || param->storage_dtype();
      quantized = quantized || param->view();
    }
}

SynthesizedValues::SynthesizedValues(const PlanConversions &conversions, const Param &of)
    : param(&of), sentDtype(of.dtype()), storageDtype(storageDtypeOf(of)) {
  const auto format = kernels::numberFormatNamed(dtypeName(sentDtype));
  if (!(conversions.cast || conversions.quantized) || !format)
    return;
  const kernels::Encoding encoding = kernels::encoding(*format);
  mask = ~(uint64_t{1} << (encoding.bits - 2));
  if (const int exponent = encoding.bits - 1 - encoding.mantissaBits; conversions.quantized && exponent > 5)
    ones = ((uint64_t{1} << (exponent - 1)) - (1 << 4)) << encoding.mantissaBits;
}

uint64_t SynthesizedValues::operator()(uint64_t key, uint64_t element) const {
  const auto bits = static_cast<unsigned>(8 * itemBytes(sentDtype));
  const uint64_t code =
      ((elementHash(key, element) & mask) | ones) & (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
  if (sentDtype == storageDtype)
    return sentDtype == DType::boolean ? code & 1 : code;
  return cast(code);
}

uint64_t SynthesizedValues::cast(uint64_t code) const {
  return kernels::encode(castFormat(storageDtype), kernels::decode(castFormat(sentDtype), static_cast<uint32_t>(code)),
                         overflowOf(*param));
}

void SynthesizedValues::cast(const std::byte *sent, std::byte *stored, int64_t count) const {
  // Not the code that the executor runs where the CPU has vectors: a check uses as little as possible of what it
  // checks.
  kernels::cast(
      {castFormat(storageDtype), stored, castFormat(sentDtype), sent, static_cast<uint64_t>(count), overflowOf(*param)},
      {.level = kernels::CpuLevel::Portable});
}

int64_t SynthesizedValues::countBeyond(const std::byte *sent, int64_t count) const {
  const kernels::NumberFormat to = castFormat(storageDtype), from = castFormat(sentDtype);
  const auto any = [&](const std::byte *at, uint64_t elements) {
    return kernels::anyBeyond(to, from, at, elements, {.level = kernels::CpuLevel::Portable});
  };
  if (param->overflow() != schema::OverflowRule::error || !kernels::mayOverflow(from, to) ||
      !any(sent, static_cast<uint64_t>(count)))
    return 0;
  int64_t beyond = 0;
  for (int64_t k = 0; k < count; ++k)
    beyond += any(sent + k * itemBytes(sentDtype), 1);
  return beyond;
}

void fill(std::byte *memory, const ElementRange &range, uint64_t key, const SynthesizedValues &values) {
  const DType type = values.storageDtype;
  const int64_t item = itemBytes(type);
  if (!values.plain() || type == DType::boolean) {
    for (int64_t k = 0; k < range.count; ++k) {
      const uint64_t code = values(key, static_cast<uint64_t>(range.logical + k * range.logicalStep));
      std::memcpy(memory + (range.local + k * range.localStep) * item, &code,
                  static_cast<size_t>(item)); // little-endian, as files are
    }
    return;
  }
  switch (item) {
  case 1:
    return fillRange<uint8_t>(memory, range, key);
  case 2:
    return fillRange<uint16_t>(memory, range, key);
  case 4:
    return fillRange<uint32_t>(memory, range, key);
  default:
    return fillRange<uint64_t>(memory, range, key);
  }
}

uint64_t tensorKey(std::string_view tensor, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : tensor)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return finish(hash + 0x9e3779b97f4a7c15u * (seed + 1));
}

uint64_t elementHash(uint64_t key, uint64_t index) { return finish(key + 0xd1b54a32d192ed03u * index); }

void synthesizeInstance(const PlanConversions &conversions, const InstanceLayout &layout, uint64_t seed,
                        std::byte *memory) {
  const SynthesizedValues values(conversions, *layout.endpoint.params()->Get(layout.instance.param));
  const int64_t item = itemBytes(values.storageDtype);
  std::string name;
  uint64_t key = 0;
  forEachRange(layout, [&](const ElementRange &range) {
    if (!range.tensor) {
      for (int64_t k = 0; k < range.count; ++k)
        std::memset(memory + (range.local + k * range.localStep) * item, 0xAB, static_cast<size_t>(item));
      return;
    }
    if (name.empty() || name != *range.tensor) {
      name = *range.tensor;
      key = tensorKey(name, seed);
    }
    fill(memory, range, key, values);
  });
}

std::vector<Bytes> synthesizeBases(const PlanConversions &conversions, const InstanceLayout &elements, uint64_t seed) {
  Bytes wide(static_cast<size_t>(elements.instance.bytes));
  synthesizeInstance(conversions, elements, seed, wide.data());
  return writeView(elements.endpoint, elements.instance.param, static_cast<uint32_t>(elements.meshRank), wide.data(),
                   tensorScales(elements));
}

void synthesize(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads) {
  const PlanConversions conversions(plan.manifest());
  const auto viewedBy = elementViews(*plan.manifest().endpoints()->Get(memory.endpoint));
  forEachInstance(plan, memory, threads, [&](const InstanceLayout &layout) {
    const ParamInstance &instance = layout.instance;
    const QuantizedView *view = layout.endpoint.params()->Get(instance.param)->view();
    if (!view && !viewedBy[instance.param])
      return synthesizeInstance(conversions, layout, seed, memory.params[instance.param][instance.instance]);
    if (!view || view->kind() != ViewKind::elements)
      return;
    const std::vector<Bytes> bases = synthesizeBases(conversions, layout, seed);
    const std::vector<uint32_t> params = baseParams(*view);
    for (size_t i = 0; i < bases.size(); ++i)
      std::copy(bases[i].begin(), bases[i].end(),
                memory.params[params[i]][instance.instance]); // data() may be null if it is empty
  });
}

} // namespace reshard::verify
