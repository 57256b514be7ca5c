// Target memory against source memory, and source replicas against each other, through the layouts of the manifest:
// every tensor is put together from what the source holds of it.

#include "tools/parallel.h"
#include "tools/reference.h"
#include "tools/vectors.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace reshard::tools {

namespace {

using namespace schema;

/// The first instance that holds an element.
const Occurrence &firstHolder(const Plan &plan, const std::vector<std::shared_ptr<const Occurrence>> &holders,
                              const std::string &name, int64_t wanted) {
  for (const auto &holder : holders) {
    bool has = false;
    forEachElement(plan, *holder, name,
                   [&](const std::byte *, int64_t element, int64_t) { has = has || element == wanted; });
    if (has)
      return *holder;
  }
  return *holders[0];
}

/// Elements of targets that no part of their layouts covers.
void checkCover(const Plan &plan, const Memory &target, CheckResult &result) {
  for (const PlaceMemory &place : target.places()) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(place.endpoint);
    const std::vector<bool> made = madeByFaces(endpoint);
    for (uint32_t p = 0; p < place.params.size(); ++p)
      for (const ParamInstance &instance : instances(plan.manifest(), endpoint, p, place.place)) {
        if (!place.params[p][instance.instance] || made[p])
          continue;
        const int64_t missing = uncovered(plan.manifest(), endpoint, p, place.place, instance);
        result.mismatches += static_cast<uint64_t>(missing);
        if (missing > 0 && result.first.empty())
          result.first =
              "param '" + instance.name + "': no part of its layout covers " + std::to_string(missing) + " elements";
      }
  }
}

/// All that an instance of a param holds, in order.
std::string contents(const Plan &plan, const PlaceMemory &place, const ParamInstance &instance) {
  std::string text = std::to_string(instance.param) + ":" + std::to_string(instance.bytes);
  forEachRun(plan.manifest(), *plan.manifest().endpoints()->Get(place.endpoint), instance.param, place.place, instance,
             [&](const ElementRun &run) {
               text += run.tensor ? " '" + *run.tensor + "'" : " padding";
               for (const int64_t number : {run.logical, run.logicalStep, run.local, run.localStep, run.count})
                 text += " " + std::to_string(number);
             });
  return text;
}

const std::byte *memoryOf(const Occurrence &occurrence) {
  return occurrence.place->params[occurrence.instance.param][occurrence.instance.instance];
}

/// Codes and scales of params that stand quantised and are no tensors of their own: those of one param that hold the
/// same elements, and so the same blocks. Padding is part of its block. Values of different params may differ by their
/// blocks.
void compareQuantised(const Plan &plan, const Memory &source, ReplicaResult &result) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(0);
  std::map<uint32_t, std::set<uint32_t>> holders; // of a tensor pattern
  for (uint32_t p = 0; p < all(endpoint.params()).size(); ++p)
    for (const Part *part : all(endpoint.params()->Get(p)->parts()))
      if (part->family() >= 0)
        holders[static_cast<uint32_t>(part->family())].insert(p);
  for (const auto &[family, params] : holders) {
    const bool blocks = std::any_of(params.begin(), params.end(), [&](uint32_t p) {
      const Face *face = endpoint.params()->Get(p)->face();
      return face && face->kind() == FaceKind::elements;
    });
    if (blocks && params.size() > 1)
      result.left.push_back(plan.manifest().families()->Get(family)->name()->str());
  }
  // By what is held, the first place that holds it: the occurrences of what its face shows.
  std::map<std::string, std::vector<Occurrence>> first;
  for (const PlaceMemory &place : source.places())
    for (uint32_t p = 0; p < place.params.size(); ++p) {
      const Face *face = endpoint.params()->Get(p)->face();
      if (!face || face->kind() != FaceKind::elements)
        continue;
      std::vector<std::vector<ParamInstance>> shown;
      for (const uint32_t each : shownParams(*face))
        shown.push_back(instances(plan.manifest(), endpoint, each, place.place));
      for (const ParamInstance &elements : instances(plan.manifest(), endpoint, p, place.place)) {
        const auto [at, added] = first.try_emplace(contents(plan, place, elements));
        for (size_t s = 0; s < shown.size(); ++s) {
          const Occurrence mine{&place, shown[s][elements.instance]};
          if (added) {
            at->second.push_back(mine);
            continue;
          }
          const Occurrence &other = at->second[s];
          const std::byte *here = memoryOf(mine), *there = memoryOf(other);
          if (!here || !there || all(endpoint.params()->Get(mine.instance.param)->parts()).size() > 0)
            continue;
          result.comparedBytes += static_cast<uint64_t>(mine.instance.bytes);
          if (const auto same = std::mismatch(here, here + mine.instance.bytes, there).first - here;
              same < mine.instance.bytes)
            result.differences.push_back(nameOf(plan, mine) + " differs from " + nameOf(plan, other) + " from byte " +
                                         std::to_string(same) + " on");
        }
      }
    }
}

} // namespace

CheckResult compare(const Plan &plan, const Memory &source, const Memory &target, unsigned threads,
                    const std::function<void(double)> &progress) {
  const Occurrences wanted = occurrences(plan, target);
  const std::vector<Occurrences::value_type> work(wanted.begin(), wanted.end());
  Reference reference(plan, source);
  CheckResult result;
  std::mutex mutex;
  parallelFor(
      work.size(), threads,
      [&](size_t i) {
        const auto &[name, targets] = work[i];
        CheckResult one;
        const TensorValues tensor = reference.gather(name);
        if (tensor.conflict() >= 0)
          one.unclear = "params of the source that hold tensor '" + name + "' show two values of element " +
                        std::to_string(tensor.conflict());
        const std::byte zeros[8] = {};
        for (const auto &occurrence : targets) {
          const Param &param =
              *plan.manifest().endpoints()->Get(occurrence->place->endpoint)->params()->Get(occurrence->instance.param);
          forEachElement(plan, *occurrence, name, [&](const std::byte *at, int64_t element, int64_t item) {
            one.checkedBytes += static_cast<uint64_t>(item);
            const bool padding = name.empty();
            uint64_t cast = 0;
            if (param.stored() && !padding && tensor.known(element)) {
              std::memcpy(&cast, tensor.at(element, itemBytes(param.dtype())),
                          static_cast<size_t>(itemBytes(param.dtype())));
              cast = castCode(param, cast);
            }
            if ((padding || tensor.known(element)) &&
                std::memcmp(at,
                            padding          ? zeros
                            : param.stored() ? reinterpret_cast<const std::byte *>(&cast)
                                             : tensor.at(element, item),
                            static_cast<size_t>(item)) == 0)
              return;
            ++one.mismatches;
            if (one.first.empty())
              one.first =
                  nameOf(plan, *occurrence) + ": " +
                  (padding ? "padding is not zero"
                           : "tensor '" + name + "' element " + std::to_string(element) + " differs from the source");
          });
        }
        std::lock_guard lock(mutex);
        result.add(std::move(one));
      },
      progress);
  for (const PlaceMemory &place : target.places())
    result.add(checkFaces(plan, place, reference, threads));
  checkCover(plan, target, result);
  return result;
}

ReplicaResult compareReplicas(const Plan &plan, const Memory &source, unsigned threads,
                              const std::function<void(double)> &progress) {
  const Occurrences held = occurrences(plan, source);
  const std::vector<Occurrences::value_type> work(held.begin(), held.end());
  ReplicaResult result;
  std::vector<std::vector<std::string>> found(work.size());
  std::mutex mutex;
  parallelFor(
      work.size(), threads,
      [&](size_t i) {
        const auto &[name, holders] = work[i];
        if (name.empty() || holders.size() < 2) // padding is never read
          return;
        TensorValues tensor;
        uint64_t compared = 0;
        for (size_t h = 0; h < holders.size(); ++h) {
          int64_t differs = -1; // the first such element
          forEachElement(plan, *holders[h], name, [&](const std::byte *at, int64_t element, int64_t item) {
            if (!tensor.known(element))
              return tensor.put(element, at, item);
            compared += static_cast<uint64_t>(item);
            if (std::memcmp(at, tensor.at(element, item), static_cast<size_t>(item)) != 0 &&
                (differs < 0 || element < differs))
              differs = element;
          });
          if (differs >= 0)
            found[i].push_back(nameOf(plan, *holders[h]) + " differs from " +
                               nameOf(plan, firstHolder(plan, holders, name, differs)) + ": tensor '" + name +
                               "' from element " + std::to_string(differs) + " on");
        }
        std::lock_guard lock(mutex);
        result.comparedBytes += compared;
      },
      progress);
  for (auto &list : found)
    std::move(list.begin(), list.end(), std::back_inserter(result.differences));
  compareQuantised(plan, source, result);
  return result;
}

} // namespace reshard::tools
