#include "tools/synthesize.h"

#include "kernels/formats.h"
#include "tools/deadline.h"
#include "tools/values.h"
#include "tools/vectors.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace reshard::tools {

using namespace schema;

namespace {

uint64_t finish(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

using Dimension = Grid::Dimension;

/// Makes one dimension of the last two while the last is held whole: runs get longer, so that all that follows is
/// faster.
void collapse(std::vector<Dimension> &dimensions) {
  while (dimensions.size() > 1) {
    const Dimension &last = dimensions.back();
    Dimension &outer = dimensions[dimensions.size() - 2];
    if (last.runs.size() != 1 || last.runs[0].count() != 1 || last.runs[0].from() != 0 || last.runs[0].to() != 0)
      return;
    const int64_t n = last.runs[0].length();
    if (outer.logicalStride != n * last.logicalStride || outer.localStride != n * last.localStride)
      return;
    for (Run &r : outer.runs)
      r = Run(r.from() * n, r.to() * n, r.length() * n, r.count(), r.from_step() * n, r.to_step() * n);
    outer.logicalStride = last.logicalStride;
    outer.localStride = last.localStride;
    dimensions.pop_back();
  }
}

/// All elements of an instance that a part covers, innermost runs as long as they are regular.
void walk(const std::vector<Dimension> &dimensions, size_t d, int64_t logical, int64_t local, ElementRun &run,
          const std::function<void(const ElementRun &)> &visit) {
  if (d == dimensions.size()) {
    run.logical = logical;
    run.local = local;
    run.logicalStep = run.localStep = 1;
    run.count = 1;
    Deadline::spend(1);
    visit(run);
    return;
  }
  const Dimension &dimension = dimensions[d];
  const bool last = d + 1 == dimensions.size();
  for (const Run &r : dimension.runs)
    for (int64_t block = 0; block < r.count(); ++block) {
      const int64_t from = r.from() + block * r.from_step(), to = r.to() + block * r.to_step();
      if (last) {
        run.logical = logical + from * dimension.logicalStride;
        run.local = local + to * dimension.localStride;
        run.logicalStep = dimension.logicalStride;
        run.localStep = dimension.localStride;
        run.count = r.length();
        Deadline::spend(run.count);
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

Values::Values(const Manifest &manifest, const Param &of) : param(&of), comes(of.dtype()), stored(storedType(of)) {
  bool cast = false, quantised = false;
  for (const Endpoint *endpoint : *manifest.endpoints())
    for (const Param *each : all(endpoint->params())) {
      cast = cast || each->stored();
      quantised = quantised || each->face();
    }
  const auto format = kernels::formatNamed(dtypeName(comes));
  if (!(cast || quantised) || !format)
    return;
  const kernels::Encoding encoding = kernels::encoding(*format);
  mask = ~(uint64_t{1} << (encoding.bits - 2));
  if (const int exponent = encoding.bits - 1 - encoding.mantissaBits; quantised && exponent > 5)
    ones = ((uint64_t{1} << (exponent - 1)) - (1 << 4)) << encoding.mantissaBits;
}

uint64_t Values::operator()(uint64_t key, uint64_t element) const {
  const auto bits = static_cast<unsigned>(8 * itemBytes(comes));
  const uint64_t code =
      ((elementHash(key, element) & mask) | ones) & (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
  if (comes == stored)
    return comes == DType::boolean ? code & 1 : code;
  return castCode(*param, code);
}

void fill(std::byte *memory, const ElementRun &run, uint64_t key, const Values &values) {
  const DType type = values.stored;
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

void Cover::add(int64_t first, int64_t step, int64_t count) {
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

int64_t Cover::missing() const {
  int64_t left = elements_;
  for (const uint64_t word : words_)
    left -= std::popcount(word);
  return left;
}

uint64_t castCode(const Param &param, uint64_t code) {
  const auto from = kernels::formatNamed(dtypeName(param.dtype())),
             to = kernels::formatNamed(dtypeName(storedType(param)));
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

void forEachGrid(const Manifest &manifest, const Endpoint &endpoint, uint32_t paramNumber, int64_t place,
                 const ParamInstance &instance, const std::function<void(const Grid &)> &visit) {
  const Param &param = *endpoint.params()->Get(paramNumber);
  std::vector<int64_t> strides(instance.shape.size(), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * instance.shape[d];
  for (const Part *part : all(param.parts())) {
    const Family *family =
        part->family() < 0 ? nullptr : manifest.families()->Get(static_cast<uint32_t>(part->family()));
    const size_t variables = family ? all(family->variables()).size() : all(param.variables()).size();
    const size_t rank = all(part->dimensions()).size();
    std::vector<int64_t> logicalStrides(rank, 0);
    if (family) {
      int64_t stride = 1;
      for (size_t d = rank; d-- > variables;) {
        logicalStrides[d] = stride;
        stride *= static_cast<int64_t>(family->shape()->Get(static_cast<uint32_t>(d - variables)));
      }
    }
    // A stacked variable makes one tensor for each of its values; the name variables are fixed by the instance.
    std::vector<int64_t> values(variables, 0);
    int stacked = -1;
    bool here = true;
    Grid grid;
    grid.family = part->family();
    std::vector<Dimension> &dimensions = grid.dimensions;
    for (size_t d = 0; d < rank; ++d) {
      const PartDimension &at = *part->dimensions()->Get(static_cast<uint32_t>(d));
      const Runs list = runs(endpoint, *endpoint.shares()->Get(at.share()), place);
      if (d < variables && at.param() < 0) {
        if (!family)
          continue;
        for (size_t v = 0; v < instance.values.size(); ++v)
          if (param.variables()->Get(static_cast<uint32_t>(v)) == family->variables()->Get(static_cast<uint32_t>(d)))
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
      const std::string name = family ? tensorName(manifest, *family, values) : std::string();
      grid.tensor = family ? &name : nullptr;
      visit(grid);
      continue;
    }
    for (const Run &r : slots.runs)
      for (int64_t block = 0; block < r.count(); ++block)
        for (int64_t k = 0; k < r.length(); ++k) {
          values[static_cast<size_t>(stacked)] = r.from() + block * r.from_step() + k;
          const std::string name = tensorName(manifest, *family, values);
          grid.tensor = &name;
          grid.local = (r.to() + block * r.to_step() + k) * slots.localStride;
          visit(grid);
        }
  }
}

void forEachRun(const Manifest &manifest, const Endpoint &endpoint, uint32_t param, int64_t place,
                const ParamInstance &instance, const std::function<void(const ElementRun &)> &visit) {
  forEachGrid(manifest, endpoint, param, place, instance, [&](const Grid &grid) {
    ElementRun run;
    run.tensor = grid.tensor;
    run.family = grid.family;
    walk(grid.dimensions, 0, 0, grid.local, run, visit);
  });
}

int64_t uncovered(const Manifest &manifest, const Endpoint &endpoint, uint32_t param, int64_t place,
                  const ParamInstance &instance) {
  Cover cover(instance.bytes / itemBytes(storedType(*endpoint.params()->Get(param))));
  forEachRun(manifest, endpoint, param, place, instance,
             [&](const ElementRun &run) { cover.add(run.local, run.localStep, run.count); });
  return cover.missing();
}

std::vector<int64_t> likeness(const Endpoint &endpoint, uint32_t number, int64_t place) {
  const Param &param = *endpoint.params()->Get(number);
  std::vector<int64_t> coordinates = {number};
  auto depend = [&](const flatbuffers::Vector<uint32_t> *axes) {
    coordinates.push_back(coordinate(endpoint, axes, place));
  };
  for (const uint32_t share : all(param.instances()))
    depend(endpoint.shares()->Get(share)->axes());
  for (const Extent *extent : all(param.shape()))
    depend(extent->axes());
  for (const Part *part : all(param.parts()))
    for (const PartDimension *dimension : all(part->dimensions()))
      depend(endpoint.shares()->Get(dimension->share())->axes());
  return coordinates;
}

void synthesizeInstance(const Manifest &manifest, const Endpoint &endpoint, uint32_t place,
                        const ParamInstance &instance, uint64_t seed, std::byte *memory) {
  const Values values(manifest, *endpoint.params()->Get(instance.param));
  const int64_t item = itemBytes(values.stored);
  std::string name;
  uint64_t key = 0;
  forEachRun(manifest, endpoint, instance.param, place, instance, [&](const ElementRun &run) {
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

void synthesize(const Plan &plan, const PlaceMemory &memory, uint64_t seed, unsigned threads) {
  const auto shownBy = shownAsElements(*plan.manifest().endpoints()->Get(memory.endpoint));
  forEachInstance(plan, memory, threads, [&](const Endpoint &endpoint, const ParamInstance &instance) {
    const Face *face = endpoint.params()->Get(instance.param)->face();
    if (!face && !shownBy[instance.param])
      return synthesizeInstance(plan.manifest(), endpoint, memory.place, instance, seed,
                                memory.params[instance.param][instance.instance]);
    if (!face || face->kind() != FaceKind::elements)
      return;
    Bytes wide(static_cast<size_t>(instance.bytes));
    synthesizeInstance(plan.manifest(), endpoint, memory.place, instance, seed, wide.data());
    const std::vector<Bytes> made = make(endpoint, instance.param, memory.place, wide.data(),
                                         synthesisedTensorScales(endpoint, instance, memory.place));
    const std::vector<uint32_t> params = shownParams(*face);
    for (size_t i = 0; i < made.size(); ++i)
      std::copy(made[i].begin(), made[i].end(),
                memory.params[params[i]][instance.instance]); // also where there is nothing
  });
}

} // namespace reshard::tools
