#include "tools/synthesize.h"

#include "kernels/formats.h"
#include "tools/vectors.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

namespace reshard::tools {

namespace {

using namespace schema;

uint64_t finish(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The runs of one dimension of a part on a place, as (logical, local) blocks.
struct Dimension {
  std::vector<Run> runs;
  int64_t logicalStride = 0, localStride = 0; // elements per position
};

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

/// Which elements of an instance the parts have covered.
class Cover {
public:
  explicit Cover(int64_t elements) : elements_(elements), words_(static_cast<size_t>((elements + 63) / 64)) {}
  void add(int64_t first, int64_t step, int64_t count) {
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
  int64_t missing() const {
    int64_t left = elements_;
    for (const uint64_t word : words_)
      left -= std::popcount(word);
    return left;
  }

private:
  int64_t elements_;
  std::vector<uint64_t> words_;
};

/// All elements of an instance that a part covers, innermost runs as long as they are regular.
void walk(const std::vector<Dimension> &dimensions, size_t d, int64_t logical, int64_t local, ElementRun &run,
          const std::function<void(const ElementRun &)> &visit) {
  if (d == dimensions.size()) {
    run.logical = logical;
    run.local = local;
    run.logicalStep = run.localStep = 1;
    run.count = 1;
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
        visit(run);
        continue;
      }
      for (int64_t k = 0; k < r.length(); ++k)
        walk(dimensions, d + 1, logical + (from + k) * dimension.logicalStride, local + (to + k) * dimension.localStride, run, visit);
    }
}

template <class Element> void fillRun(Element *out, int64_t step, uint64_t key, int64_t logical, int64_t logicalStep, int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    out[k * step] = static_cast<Element>(elementHash(key, static_cast<uint64_t>(logical + k * logicalStep)));
}

template <class Element> int64_t differences(const Element *in, int64_t step, uint64_t key, int64_t logical, int64_t logicalStep, int64_t count) {
  int64_t wrong = 0;
  for (int64_t k = 0; k < count; ++k)
    wrong += in[k * step] != static_cast<Element>(elementHash(key, static_cast<uint64_t>(logical + k * logicalStep)));
  return wrong;
}

/// What stands in an element, by its tensor's key and its number.
struct Values {
  const Param *param;
  DType comes, stored;
  uint64_t mask = ~uint64_t{0}; // of what comes

  /// Of a param. In plans that cast, all floats are finite: the highest bit of the exponent is 0.
  Values(const Manifest &manifest, const Param &of) : param(&of), comes(of.dtype()), stored(storedType(of)) {
    bool cast = false;
    for (const Endpoint *endpoint : *manifest.endpoints())
      for (const Param *each : all(endpoint->params()))
        cast = cast || each->stored();
    if (const auto format = kernels::formatNamed(dtypeName(comes)); cast && format)
      mask = ~(uint64_t{1} << (kernels::encoding(*format).bits - 2));
  }
  bool plain() const { return comes == stored && mask == ~uint64_t{0}; }
  uint64_t operator()(uint64_t key, uint64_t element) const {
    const auto bits = static_cast<unsigned>(8 * itemBytes(comes));
    const uint64_t code = elementHash(key, element) & mask & (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
    if (comes == stored)
      return comes == DType::boolean ? code & 1 : code;
    return castCode(*param, code);
  }
};

void fill(std::byte *memory, const ElementRun &run, uint64_t key, const Values &values) {
  const DType type = values.stored;
  const int64_t item = itemBytes(type);
  if (!values.plain()) {
    for (int64_t k = 0; k < run.count; ++k) {
      const uint64_t code = values(key, static_cast<uint64_t>(run.logical + k * run.logicalStep));
      std::memcpy(memory + (run.local + k * run.localStep) * item, &code, static_cast<size_t>(item)); // little-endian, as files are
    }
    return;
  }
  std::byte *at = memory + run.local * item;
  if (type == DType::boolean) {
    for (int64_t k = 0; k < run.count; ++k)
      at[k * run.localStep] = static_cast<std::byte>(elementHash(key, static_cast<uint64_t>(run.logical + k * run.logicalStep)) & 1);
    return;
  }
  switch (item) {
  case 1: return fillRun(reinterpret_cast<uint8_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 2: return fillRun(reinterpret_cast<uint16_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 4: return fillRun(reinterpret_cast<uint32_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  default: return fillRun(reinterpret_cast<uint64_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  }
}

int64_t wrong(const std::byte *memory, const ElementRun &run, uint64_t key, const Values &values) {
  const DType type = values.stored;
  const int64_t item = itemBytes(type);
  if (run.tensor && !values.plain()) {
    int64_t count = 0;
    for (int64_t k = 0; k < run.count; ++k) {
      const uint64_t code = values(key, static_cast<uint64_t>(run.logical + k * run.logicalStep));
      count += std::memcmp(memory + (run.local + k * run.localStep) * item, &code, static_cast<size_t>(item)) != 0;
    }
    return count;
  }
  const std::byte *at = memory + run.local * item;
  if (!run.tensor || type == DType::boolean) {
    int64_t count = 0;
    for (int64_t k = 0; k < run.count; ++k) {
      const auto expected = run.tensor ? static_cast<std::byte>(elementHash(key, static_cast<uint64_t>(run.logical + k * run.logicalStep)) & 1) : std::byte{0};
      bool right = at[k * run.localStep * item] == expected;
      for (int64_t b = 1; b < item; ++b)
        right = right && at[k * run.localStep * item + b] == std::byte{0};
      count += !right;
    }
    return count;
  }
  switch (item) {
  case 1: return differences(reinterpret_cast<const uint8_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 2: return differences(reinterpret_cast<const uint16_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  case 4: return differences(reinterpret_cast<const uint32_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  default: return differences(reinterpret_cast<const uint64_t *>(at), run.localStep, key, run.logical, run.logicalStep, run.count);
  }
}

struct Item {
  uint32_t param;
  ParamInstance instance;
  std::byte *memory;
};

/// Every instance with memory, for several threads to work through.
template <class Work> void forEachInstance(const Plan &plan, const PlaceMemory &memory, unsigned threads, Work work) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
  std::vector<Item> items;
  for (uint32_t p = 0; p < memory.params.size(); ++p) {
    std::vector<ParamInstance> list = instances(plan.manifest(), endpoint, p, memory.place);
    for (size_t i = 0; i < list.size(); ++i)
      if (memory.params[p][i])
        items.push_back({p, std::move(list[i]), memory.params[p][i]});
  }
  std::atomic<size_t> next{0};
  auto run = [&] {
    for (size_t i = next++; i < items.size(); i = next++)
      work(endpoint, items[i]);
  };
  std::vector<std::thread> helpers;
  for (unsigned t = 1; t < std::min<size_t>(threads, items.size()); ++t)
    helpers.emplace_back(run);
  run();
  for (std::thread &helper : helpers)
    helper.join();
}

std::string describe(const Plan &plan, const Endpoint &endpoint, const PlaceMemory &memory, const Item &item, const ElementRun &run,
                     uint64_t key) {
  const Values values(plan.manifest(), *endpoint.params()->Get(item.param));
  const int64_t bytes = itemBytes(values.stored);
  for (int64_t k = 0; k < run.count; ++k) {
    ElementRun one = run;
    one.logical += k * run.logicalStep;
    one.local += k * run.localStep;
    one.count = 1;
    if (wrong(item.memory, one, key, values) == 0)
      continue;
    uint64_t found = 0;
    std::memcpy(&found, item.memory + one.local * bytes, static_cast<size_t>(bytes));
    char text[120];
    std::snprintf(text, sizeof text, "found 0x%0*llx, expected 0x%0*llx", static_cast<int>(2 * bytes), static_cast<unsigned long long>(found),
                  static_cast<int>(2 * bytes),
                  static_cast<unsigned long long>(run.tensor ? values(key, static_cast<uint64_t>(one.logical)) : 0));
    return endpoint.role()->str() + (endpoint.storage() ? " file " : " rank ") + std::to_string(endpoint.ranks()->Get(memory.place)) +
           " param '" + item.instance.name + "' element " + std::to_string(one.local) + " (" +
           (run.tensor ? "'" + *run.tensor + "' element " + std::to_string(one.logical) : std::string("padding")) + "): " + text;
  }
  return {};
}

} // namespace

uint64_t castCode(const Param &param, uint64_t code) {
  const auto from = kernels::formatNamed(dtypeName(param.dtype())), to = kernels::formatNamed(dtypeName(storedType(param)));
  return kernels::encode(to.value(), kernels::decode(from.value(), static_cast<uint32_t>(code)), kernels::Overflow::saturate);
}

uint64_t tensorKey(std::string_view tensor, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : tensor)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return finish(hash + 0x9e3779b97f4a7c15u * (seed + 1));
}

uint64_t elementHash(uint64_t key, uint64_t index) { return finish(key + 0xd1b54a32d192ed03u * index); }

void forEachRun(const Manifest &manifest, const Endpoint &endpoint, uint32_t paramNumber, int64_t place, const ParamInstance &instance,
                const std::function<void(const ElementRun &)> &visit) {
  const Param &param = *endpoint.params()->Get(paramNumber);
  std::vector<int64_t> strides(instance.shape.size(), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * instance.shape[d];
  for (const Part *part : all(param.parts())) {
    const Family *family = part->family() < 0 ? nullptr : manifest.families()->Get(static_cast<uint32_t>(part->family()));
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
    std::vector<Dimension> dimensions;
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
      ElementRun run;
      run.tensor = family ? &name : nullptr;
      walk(dimensions, 0, 0, 0, run, visit);
      continue;
    }
    for (const Run &r : slots.runs)
      for (int64_t block = 0; block < r.count(); ++block)
        for (int64_t k = 0; k < r.length(); ++k) {
          values[static_cast<size_t>(stacked)] = r.from() + block * r.from_step() + k;
          const std::string name = tensorName(manifest, *family, values);
          ElementRun run;
          run.tensor = &name;
          walk(dimensions, 0, 0, (r.to() + block * r.to_step() + k) * slots.localStride, run, visit);
        }
  }
}

int64_t uncovered(const Manifest &manifest, const Endpoint &endpoint, uint32_t param, int64_t place,
                  const ParamInstance &instance) {
  Cover cover(instance.bytes / itemBytes(storedType(*endpoint.params()->Get(param))));
  forEachRun(manifest, endpoint, param, place, instance,
             [&](const ElementRun &run) { cover.add(run.local, run.localStep, run.count); });
  return cover.missing();
}

void synthesize(const Plan &plan, const PlaceMemory &memory, uint64_t seed, unsigned threads) {
  forEachInstance(plan, memory, threads, [&](const Endpoint &endpoint, const Item &item) {
    const Values values(plan.manifest(), *endpoint.params()->Get(item.param));
    const DType type = values.stored;
    const std::string *last = nullptr;
    std::string name;
    uint64_t key = 0;
    forEachRun(plan.manifest(), endpoint, item.param, memory.place, item.instance, [&](const ElementRun &run) {
      if (!run.tensor) {
        for (int64_t k = 0; k < run.count; ++k)
          std::memset(item.memory + (run.local + k * run.localStep) * itemBytes(type), 0xAB, static_cast<size_t>(itemBytes(type)));
        return;
      }
      if (run.tensor != last || name != *run.tensor) {
        last = run.tensor;
        name = *run.tensor;
        key = tensorKey(name, seed);
      }
      fill(item.memory, run, key, values);
    });
  });
}

CheckResult check(const Plan &plan, const PlaceMemory &memory, uint64_t seed, unsigned threads) {
  CheckResult result;
  std::mutex mutex;
  forEachInstance(plan, memory, threads, [&](const Endpoint &endpoint, const Item &item) {
    const Values values(plan.manifest(), *endpoint.params()->Get(item.param));
    const int64_t elements = item.instance.bytes / itemBytes(values.stored);
    Cover cover(elements);
    int64_t mismatches = 0;
    std::string first, name;
    uint64_t key = 0;
    const std::string *last = nullptr;
    forEachRun(plan.manifest(), endpoint, item.param, memory.place, item.instance, [&](const ElementRun &run) {
      if (run.tensor && (run.tensor != last || name != *run.tensor)) {
        last = run.tensor;
        name = *run.tensor;
        key = tensorKey(name, seed);
      }
      cover.add(run.local, run.localStep, run.count);
      const int64_t bad = wrong(item.memory, run, key, values);
      if (bad > 0 && first.empty())
        first = describe(plan, endpoint, memory, item, run, key);
      mismatches += bad;
    });
    if (const int64_t missing = cover.missing(); missing > 0) {
      mismatches += missing;
      if (first.empty())
        first = "param '" + item.instance.name + "': no part of its layout covers " + std::to_string(missing) + " of " +
                std::to_string(elements) + " elements";
    }
    std::lock_guard lock(mutex);
    result.checkedBytes += static_cast<uint64_t>(item.instance.bytes);
    result.mismatches += static_cast<uint64_t>(mismatches);
    if (result.first.empty())
      result.first = std::move(first);
  });
  return result;
}

} // namespace reshard::tools
