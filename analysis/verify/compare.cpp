// Compares target memory with source memory, and source replicas with each other, through the layouts of the manifest.
// Each tensor is assembled from all source instances that hold a part of it.

#include "analysis/flatbuffer_vectors.h"
#include "analysis/parallel.h"
#include "analysis/verify/reference.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace reshard::analysis {

namespace {

using namespace schema;

/// The first replica that holds an element.
const TensorInstance &firstReplica(const Plan &plan, const std::vector<std::shared_ptr<const TensorInstance>> &replicas,
                                   const std::string &name, int64_t wanted) {
  for (const auto &replica : replicas) {
    bool has = false;
    forEachElement(plan, *replica, name,
                   [&](const std::byte *, int64_t element, int64_t) { has = has || element == wanted; });
    if (has)
      return *replica;
  }
  return *replicas[0];
}

/// Counts target elements that no part of their layout covers.
void checkCoverage(const Plan &plan, const Memory &target, CheckResult &result) {
  for (const MeshRankMemory &rankMemory : target.rankMemories()) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(rankMemory.endpoint);
    const std::vector<bool> derived = derivedParams(endpoint);
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
      for (const ParamInstance &instance : instances(plan.manifest(), endpoint, p, rankMemory.meshRank)) {
        if (!rankMemory.params[p][instance.instance] || derived[p])
          continue;
        const int64_t missing = uncovered(plan.manifest(), endpoint, p, rankMemory.meshRank, instance);
        result.mismatches += static_cast<uint64_t>(missing);
        if (missing > 0 && result.first.empty())
          result.first = "param '" + instance.name + "': " + std::to_string(missing) +
                         " elements are covered by no part of its layout";
      }
  }
}

/// A description of all runs of elements that an instance holds, in order: equal texts mean equal contents.
std::string contents(const Plan &plan, const MeshRankMemory &rankMemory, const ParamInstance &instance) {
  std::string text = std::to_string(instance.param) + ":" + std::to_string(instance.bytes);
  forEachRun(plan.manifest(), *plan.manifest().endpoints()->Get(rankMemory.endpoint), instance.param,
             rankMemory.meshRank, instance, [&](const ElementRun &run) {
               text += run.tensor ? " '" + *run.tensor + "'" : " padding";
               for (const int64_t number : {run.logical, run.logicalStep, run.local, run.localStep, run.count})
                 text += " " + std::to_string(number);
             });
  return text;
}

const std::byte *memoryOf(const TensorInstance &tensorInstance) {
  return tensorInstance.rankMemory->params[tensorInstance.instance.param][tensorInstance.instance.instance];
}

/// Compares the codes and scales of quantized params among replicas of the same param, which hold the same elements and
/// thus the same blocks. Padding is part of its block. Different params of one tensor are not compared, since their
/// blocks may differ.
void compareQuantized(const Plan &plan, const Memory &source, ReplicaResult &result) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(0);
  std::map<uint32_t, std::set<uint32_t>> paramsByPattern; // params of the source
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p)
    for (const Part *part : orEmpty(endpoint.params()->Get(p)->parts()))
      if (part->pattern() >= 0)
        paramsByPattern[static_cast<uint32_t>(part->pattern())].insert(p);
  for (const auto &[pattern, params] : paramsByPattern) {
    const bool blocks = std::any_of(params.begin(), params.end(), [&](uint32_t p) {
      const QuantizedView *view = endpoint.params()->Get(p)->view();
      return view && view->kind() == ViewKind::elements;
    });
    if (blocks && params.size() > 1)
      result.skipped.push_back(plan.manifest().tensor_patterns()->Get(pattern)->name()->str());
  }
  // By contents, the base params of the first mesh rank that holds them.
  std::map<std::string, std::vector<TensorInstance>> first;
  for (const MeshRankMemory &rankMemory : source.rankMemories())
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p) {
      const QuantizedView *view = endpoint.params()->Get(p)->view();
      if (!view || view->kind() != ViewKind::elements)
        continue;
      std::vector<std::vector<ParamInstance>> bases;
      for (const uint32_t each : baseParams(*view))
        bases.push_back(instances(plan.manifest(), endpoint, each, rankMemory.meshRank));
      for (const ParamInstance &elements : instances(plan.manifest(), endpoint, p, rankMemory.meshRank)) {
        const auto [at, added] = first.try_emplace(contents(plan, rankMemory, elements));
        for (size_t s = 0; s < bases.size(); ++s) {
          const TensorInstance mine{&rankMemory, bases[s][elements.instance]};
          if (added) {
            at->second.push_back(mine);
            continue;
          }
          const TensorInstance &other = at->second[s];
          const std::byte *here = memoryOf(mine), *there = memoryOf(other);
          if (!here || !there || orEmpty(endpoint.params()->Get(mine.instance.param)->parts()).size() > 0)
            continue;
          result.comparedBytes += static_cast<uint64_t>(mine.instance.bytes);
          if (const auto same = std::mismatch(here, here + mine.instance.bytes, there).first - here;
              same < mine.instance.bytes)
            result.differences.push_back(nameOf(plan, mine) + " differs from " + nameOf(plan, other) +
                                         ": the first different byte is " + std::to_string(same));
        }
      }
    }
}

} // namespace

CheckResult compare(const Plan &plan, const Memory &source, const Memory &target, unsigned threads,
                    const std::function<void(double)> &progress) {
  const InstancesByTensor wanted = instancesByTensor(plan, target);
  const std::vector<InstancesByTensor::value_type> work(wanted.begin(), wanted.end());
  Reference reference(plan, source);
  CheckResult result;
  std::mutex mutex;
  parallelFor(
      work.size(), threads,
      [&](size_t i) {
        const auto &[name, targets] = work[i];
        CheckResult one;
        const TensorValues tensor = reference.assemble(name);
        if (tensor.conflict() >= 0)
          one.ambiguity = "source params that hold tensor '" + name + "' give two different values for element " +
                          std::to_string(tensor.conflict());
        const std::byte zeros[8] = {};
        for (const auto &tensorInstance : targets) {
          const Param &param = *plan.manifest()
                                    .endpoints()
                                    ->Get(tensorInstance->rankMemory->endpoint)
                                    ->params()
                                    ->Get(tensorInstance->instance.param);
          forEachElement(plan, *tensorInstance, name, [&](const std::byte *at, int64_t element, int64_t item) {
            one.checkedBytes += static_cast<uint64_t>(item);
            const bool padding = name.empty();
            uint64_t cast = 0;
            if (param.storage_dtype() && !padding && tensor.known(element)) {
              std::memcpy(&cast, tensor.at(element, itemBytes(param.dtype())),
                          static_cast<size_t>(itemBytes(param.dtype())));
              cast = castCode(param, cast);
            }
            if ((padding || tensor.known(element)) &&
                std::memcmp(at,
                            padding                 ? zeros
                            : param.storage_dtype() ? reinterpret_cast<const std::byte *>(&cast)
                                                    : tensor.at(element, item),
                            static_cast<size_t>(item)) == 0)
              return;
            ++one.mismatches;
            if (one.first.empty())
              one.first =
                  nameOf(plan, *tensorInstance) + ": " +
                  (padding ? "padding is not zero"
                           : "tensor '" + name + "' element " + std::to_string(element) + " differs from the source");
          });
        }
        std::lock_guard lock(mutex);
        result.add(std::move(one));
      },
      progress);
  for (const MeshRankMemory &rankMemory : target.rankMemories())
    result.add(checkViews(plan, rankMemory, reference, threads));
  checkCoverage(plan, target, result);
  return result;
}

ReplicaResult compareReplicas(const Plan &plan, const Memory &source, unsigned threads,
                              const std::function<void(double)> &progress) {
  const InstancesByTensor held = instancesByTensor(plan, source);
  const std::vector<InstancesByTensor::value_type> work(held.begin(), held.end());
  ReplicaResult result;
  std::vector<std::vector<std::string>> found(work.size());
  std::mutex mutex;
  parallelFor(
      work.size(), threads,
      [&](size_t i) {
        const auto &[name, replicas] = work[i];
        if (name.empty() || replicas.size() < 2) // padding is never read
          return;
        TensorValues tensor;
        uint64_t compared = 0;
        for (size_t h = 0; h < replicas.size(); ++h) {
          int64_t differs = -1; // the first such element
          forEachElement(plan, *replicas[h], name, [&](const std::byte *at, int64_t element, int64_t item) {
            if (!tensor.known(element))
              return tensor.put(element, at, item);
            compared += static_cast<uint64_t>(item);
            if (std::memcmp(at, tensor.at(element, item), static_cast<size_t>(item)) != 0 &&
                (differs < 0 || element < differs))
              differs = element;
          });
          if (differs >= 0)
            found[i].push_back(nameOf(plan, *replicas[h]) + " differs from " +
                               nameOf(plan, firstReplica(plan, replicas, name, differs)) + ": tensor '" + name +
                               "', the first different element is " + std::to_string(differs));
        }
        std::lock_guard lock(mutex);
        result.comparedBytes += compared;
      },
      progress);
  for (auto &list : found)
    std::move(list.begin(), list.end(), std::back_inserter(result.differences));
  compareQuantized(plan, source, result);
  return result;
}

} // namespace reshard::analysis
