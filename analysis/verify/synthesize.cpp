#include "analysis/verify/synthesize.h"

#include "analysis/flatbuffer_vectors.h"
#include "analysis/verify/synthesized_values.h"
#include "analysis/work_deadline.h"
#include "kernels/formats.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace reshard::analysis {

using namespace schema;

namespace {

uint64_t finish(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

using Dimension = PartGrid::Dimension;

/// Merges the last two dimensions as long as the last one is held whole: longer runs are processed faster.
void collapse(std::vector<Dimension> &dimensions) {
  while (dimensions.size() > 1) {
    const Dimension &last = dimensions.back();
    Dimension &outer = dimensions[dimensions.size() - 2];
    if (last.blocks.size() != 1 || last.blocks[0].count() != 1 || last.blocks[0].from() != 0 ||
        last.blocks[0].to() != 0)
      return;
    const int64_t n = last.blocks[0].length();
    if (outer.logicalStride != n * last.logicalStride || outer.localStride != n * last.localStride)
      return;
    for (IndexBlock &r : outer.blocks)
      r = IndexBlock(r.from() * n, r.to() * n, r.length() * n, r.count(), r.from_step() * n, r.to_step() * n);
    outer.logicalStride = last.logicalStride;
    outer.localStride = last.localStride;
    dimensions.pop_back();
  }
}

/// Calls visit(run) for all elements of an instance that a part covers.
void walk(const std::vector<Dimension> &dimensions, size_t d, int64_t logical, int64_t local, ElementRun &run,
          const std::function<void(const ElementRun &)> &visit) {
  if (d == dimensions.size()) {
    run.logical = logical;
    run.local = local;
    run.logicalStep = run.localStep = 1;
    run.count = 1;
    WorkDeadline::spend(1);
    visit(run);
    return;
  }
  const Dimension &dimension = dimensions[d];
  const bool last = d + 1 == dimensions.size();
  for (const IndexBlock &r : dimension.blocks)
    for (int64_t block = 0; block < r.count(); ++block) {
      const int64_t from = r.from() + block * r.from_step(), to = r.to() + block * r.to_step();
      if (last) {
        run.logical = logical + from * dimension.logicalStride;
        run.local = local + to * dimension.localStride;
        run.logicalStep = dimension.logicalStride;
        run.localStep = dimension.localStride;
        run.count = r.length();
        WorkDeadline::spend(run.count);
        visit(run);
        continue;
      }
      for (int64_t k = 0; k < r.length(); ++k)
        walk(dimensions, d + 1, logical + (from + k) * dimension.logicalStride,
             local + (to + k) * dimension.localStride, run, visit);
    }
}

template <class Element>
void fillRun(Element *out, int64_t step, uint64_t key, int64_t logical, int64_t logicalStep, int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    out[k * step] = static_cast<Element>(elementHash(key, static_cast<uint64_t>(logical + k * logicalStep)));
}

} // namespace

SynthesizedValues::SynthesizedValues(const Manifest &manifest, const Param &of)
    : param(&of), sentDtype(of.dtype()), storageDtype(storageDtypeOf(of)) {
  bool cast = false, quantized = false;
  for (const Endpoint *endpoint : *manifest.endpoints())
    for (const Param *each : orEmpty(endpoint->params())) {
      cast = cast || each->storage_dtype();
      quantized = quantized || each->view();
    }
  const auto format = kernels::formatNamed(dtypeName(sentDtype));
  if (!(cast || quantized) || !format)
    return;
  const kernels::Encoding encoding = kernels::encoding(*format);
  mask = ~(uint64_t{1} << (encoding.bits - 2));
  if (const int exponent = encoding.bits - 1 - encoding.mantissaBits; quantized && exponent > 5)
    ones = ((uint64_t{1} << (exponent - 1)) - (1 << 4)) << encoding.mantissaBits;
}

uint64_t SynthesizedValues::operator()(uint64_t key, uint64_t element) const {
  const auto bits = static_cast<unsigned>(8 * itemBytes(sentDtype));
  const uint64_t code =
      ((elementHash(key, element) & mask) | ones) & (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
  if (sentDtype == storageDtype)
    return sentDtype == DType::boolean ? code & 1 : code;
  return castCode(*param, code);
}

void fill(std::byte *memory, const ElementRun &run, uint64_t key, const SynthesizedValues &values) {
  const DType type = values.storageDtype;
  const int64_t item = itemBytes(type);
  if (!values.plain()) {
    for (int64_t k = 0; k < run.count; ++k) {
      const uint64_t code = values(key, static_cast<uint64_t>(run.logical + k * run.logicalStep));
      std::memcpy(memory + (run.local + k * run.localStep) * item, &code,
                  static_cast<size_t>(item)); // little-endian, as files are
    }
    return;
  }
  std::byte *at = memory + run.local * item;
  if (type == DType::boolean) {
    for (int64_t k = 0; k < run.count; ++k)
      at[k * run.localStep] =
          static_cast<std::byte>(elementHash(key, static_cast<uint64_t>(run.logical + k * run.logicalStep)) & 1);
    return;
  }
  switch (item) {
  case 1:
    return fillRun(reinterpret_cast<uint8_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 2:
    return fillRun(reinterpret_cast<uint16_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 4:
    return fillRun(reinterpret_cast<uint32_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  default:
    return fillRun(reinterpret_cast<uint64_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  }
}

void Coverage::add(int64_t first, int64_t step, int64_t count) {
  if (step != 1) {
    for (int64_t k = 0; k < count; ++k)
      words_[static_cast<size_t>((first + k * step) / 64)] |= uint64_t{1} << ((first + k * step) % 64);
    return;
  }
  for (int64_t at = first; at < first + count;) {
    const int64_t bit = at % 64, take = std::min(64 - bit, first + count - at);
    words_[static_cast<size_t>(at / 64)] |= (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1) << bit;
    at += take;
  }
}

int64_t Coverage::missing() const {
  int64_t left = elements_;
  for (const uint64_t word : words_)
    left -= std::popcount(word);
  return left;
}

uint64_t castCode(const Param &param, uint64_t code) {
  const auto from = kernels::formatNamed(dtypeName(param.dtype())),
             to = kernels::formatNamed(dtypeName(storageDtypeOf(param)));
  return kernels::encode(to.value(), kernels::decode(from.value(), static_cast<uint32_t>(code)),
                         kernels::Overflow::saturate);
}

uint64_t tensorKey(std::string_view tensor, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : tensor)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return finish(hash + 0x9e3779b97f4a7c15u * (seed + 1));
}

uint64_t elementHash(uint64_t key, uint64_t index) { return finish(key + 0xd1b54a32d192ed03u * index); }

void forEachPartGrid(const Manifest &manifest, const Endpoint &endpoint, uint32_t paramNumber, int64_t meshRank,
                     const ParamInstance &instance, const std::function<void(const PartGrid &)> &visit) {
  const Param &param = *endpoint.params()->Get(paramNumber);
  std::vector<int64_t> strides(instance.shape.size(), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * instance.shape[d];
  for (const Part *part : orEmpty(param.parts())) {
    const TensorPattern *pattern =
        part->pattern() < 0 ? nullptr : manifest.tensor_patterns()->Get(static_cast<uint32_t>(part->pattern()));
    const size_t variables = pattern ? orEmpty(pattern->variables()).size() : orEmpty(param.variables()).size();
    const size_t rank = orEmpty(part->dimensions()).size();
    std::vector<int64_t> logicalStrides(rank, 0);
    if (pattern) {
      int64_t stride = 1;
      for (size_t d = rank; d-- > variables;) {
        logicalStrides[d] = stride;
        stride *= static_cast<int64_t>(pattern->shape()->Get(static_cast<uint32_t>(d - variables)));
      }
    }
    // A stacked variable makes one tensor for each of its values; the name variables are fixed by the instance.
    std::vector<int64_t> values(variables, 0);
    int stacked = -1;
    bool here = true;
    PartGrid grid;
    grid.pattern = part->pattern();
    std::vector<Dimension> &dimensions = grid.dimensions;
    for (size_t d = 0; d < rank; ++d) {
      const PartDimension &at = *part->dimensions()->Get(static_cast<uint32_t>(d));
      const IndexMap list = indexMap(endpoint, *endpoint.shardings()->Get(at.sharding()), meshRank);
      if (d < variables && at.param() < 0) {
        if (!pattern)
          continue;
        for (size_t v = 0; v < instance.values.size(); ++v)
          if (param.variables()->Get(static_cast<uint32_t>(v)) == pattern->variables()->Get(static_cast<uint32_t>(d)))
            values[d] = instance.values[v];
        here = here && list.map(values[d]);
        continue;
      }
      if (d < variables)
        stacked = static_cast<int>(d);
      dimensions.push_back({{list.begin, list.end}, logicalStrides[d], strides[static_cast<size_t>(at.param())]});
    }
    if (!here)
      continue;
    const bool stacks = stacked >= 0;
    const Dimension slots =
        stacks ? dimensions.front() : Dimension(); // variables come first, and at most one is stacked
    if (stacks)
      dimensions.erase(dimensions.begin());
    collapse(dimensions);
    if (!stacks) {
      const std::string name = pattern ? tensorName(manifest, *pattern, values) : std::string();
      grid.tensor = pattern ? &name : nullptr;
      visit(grid);
      continue;
    }
    for (const IndexBlock &r : slots.blocks)
      for (int64_t block = 0; block < r.count(); ++block)
        for (int64_t k = 0; k < r.length(); ++k) {
          values[static_cast<size_t>(stacked)] = r.from() + block * r.from_step() + k;
          const std::string name = tensorName(manifest, *pattern, values);
          grid.tensor = &name;
          grid.local = (r.to() + block * r.to_step() + k) * slots.localStride;
          visit(grid);
        }
  }
}

void forEachRun(const Manifest &manifest, const Endpoint &endpoint, uint32_t param, int64_t meshRank,
                const ParamInstance &instance, const std::function<void(const ElementRun &)> &visit) {
  forEachPartGrid(manifest, endpoint, param, meshRank, instance, [&](const PartGrid &grid) {
    ElementRun run;
    run.tensor = grid.tensor;
    run.pattern = grid.pattern;
    walk(grid.dimensions, 0, 0, grid.local, run, visit);
  });
}

int64_t uncovered(const Manifest &manifest, const Endpoint &endpoint, uint32_t param, int64_t meshRank,
                  const ParamInstance &instance) {
  Coverage coverage(instance.bytes / itemBytes(storageDtypeOf(*endpoint.params()->Get(param))));
  forEachRun(manifest, endpoint, param, meshRank, instance,
             [&](const ElementRun &run) { coverage.add(run.local, run.localStep, run.count); });
  return coverage.missing();
}

std::vector<int64_t> equivalenceKey(const Endpoint &endpoint, uint32_t number, int64_t meshRank) {
  const Param &param = *endpoint.params()->Get(number);
  std::vector<int64_t> coordinates = {number};
  auto depend = [&](const flatbuffers::Vector<uint32_t> *axes) {
    coordinates.push_back(coordinate(endpoint, axes, meshRank));
  };
  for (const uint32_t sharding : orEmpty(param.instances()))
    depend(endpoint.shardings()->Get(sharding)->axes());
  for (const Extent *extent : orEmpty(param.shape()))
    depend(extent->axes());
  for (const Part *part : orEmpty(param.parts()))
    for (const PartDimension *dimension : orEmpty(part->dimensions()))
      depend(endpoint.shardings()->Get(dimension->sharding())->axes());
  return coordinates;
}

void synthesizeInstance(const Manifest &manifest, const Endpoint &endpoint, uint32_t meshRank,
                        const ParamInstance &instance, uint64_t seed, std::byte *memory) {
  const SynthesizedValues values(manifest, *endpoint.params()->Get(instance.param));
  const int64_t item = itemBytes(values.storageDtype);
  std::string name;
  uint64_t key = 0;
  forEachRun(manifest, endpoint, instance.param, meshRank, instance, [&](const ElementRun &run) {
    if (!run.tensor) {
      for (int64_t k = 0; k < run.count; ++k)
        std::memset(memory + (run.local + k * run.localStep) * item, 0xAB, static_cast<size_t>(item));
      return;
    }
    if (name.empty() || name != *run.tensor) {
      name = *run.tensor;
      key = tensorKey(name, seed);
    }
    fill(memory, run, key, values);
  });
}

void synthesize(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads) {
  const auto viewedBy = elementViews(*plan.manifest().endpoints()->Get(memory.endpoint));
  forEachInstance(plan, memory, threads, [&](const Endpoint &endpoint, const ParamInstance &instance) {
    const QuantizedView *view = endpoint.params()->Get(instance.param)->view();
    if (!view && !viewedBy[instance.param])
      return synthesizeInstance(plan.manifest(), endpoint, memory.meshRank, instance, seed,
                                memory.params[instance.param][instance.instance]);
    if (!view || view->kind() != ViewKind::elements)
      return;
    Bytes wide(static_cast<size_t>(instance.bytes));
    synthesizeInstance(plan.manifest(), endpoint, memory.meshRank, instance, seed, wide.data());
    const std::vector<Bytes> derived = writeView(endpoint, instance.param, memory.meshRank, wide.data(),
                                                 synthesizedTensorScales(endpoint, instance, memory.meshRank));
    const std::vector<uint32_t> params = baseParams(*view);
    for (size_t i = 0; i < derived.size(); ++i)
      std::copy(derived[i].begin(), derived[i].end(),
                memory.params[params[i]][instance.instance]); // data() may be null if it is empty
  });
}

} // namespace reshard::analysis
