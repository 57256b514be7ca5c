// Target memory against source memory, and source replicas against each other, through the layouts of the manifest:
// every tensor is put together from what the source holds of it.

#include "tools/occurrences.h"
#include "tools/parallel.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace reshard::tools {

namespace {

using namespace schema;

/// A tensor as some instances hold it.
class Gathered {
public:
  /// Where an element stands; bytes of an element that nobody put are nothing.
  std::byte *at(int64_t element, int64_t item) {
    const size_t end = static_cast<size_t>((element + 1) * item);
    if (bytes_.size() < end)
      bytes_.resize(end * 3 / 2);
    return bytes_.data() + element * item;
  }
  bool known(int64_t element) const {
    return static_cast<size_t>(element) < known_.size() && known_[static_cast<size_t>(element)];
  }
  void know(int64_t element) {
    if (static_cast<size_t>(element) >= known_.size())
      known_.resize(static_cast<size_t>(element + 1) * 3 / 2);
    known_[static_cast<size_t>(element)] = true;
  }

private:
  std::vector<std::byte> bytes_;
  std::vector<bool> known_;
};

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
    for (uint32_t p = 0; p < place.params.size(); ++p)
      for (const ParamInstance &instance : instances(plan.manifest(), endpoint, p, place.place)) {
        if (!place.params[p][instance.instance])
          continue;
        const int64_t missing = uncovered(plan.manifest(), endpoint, p, place.place, instance);
        result.mismatches += static_cast<uint64_t>(missing);
        if (missing > 0 && result.first.empty())
          result.first =
              "param '" + instance.name + "': no part of its layout covers " + std::to_string(missing) + " elements";
      }
  }
}

} // namespace

CheckResult compare(const Plan &plan, const Memory &source, const Memory &target, unsigned threads,
                    const std::function<void(double)> &progress) {
  const Occurrences held = occurrences(plan, source), wanted = occurrences(plan, target);
  const std::vector<Occurrences::value_type> work(wanted.begin(), wanted.end());
  CheckResult result;
  std::mutex mutex;
  parallelFor(
      work.size(), threads,
      [&](size_t i) {
        const auto &[name, targets] = work[i];
        CheckResult one;
        Gathered tensor;
        if (const auto sources = held.find(name); !name.empty() && sources != held.end())
          for (const auto &occurrence : sources->second)
            forEachElement(plan, *occurrence, name, [&](const std::byte *at, int64_t element, int64_t item) {
              std::memcpy(tensor.at(element, item), at, static_cast<size_t>(item));
              tensor.know(element);
            });
        const std::byte zeros[8] = {};
        for (const auto &occurrence : targets) {
          const Param &param = *plan.manifest().endpoints()->Get(occurrence->place->endpoint)->params()->Get(occurrence->instance.param);
          forEachElement(plan, *occurrence, name, [&](const std::byte *at, int64_t element, int64_t item) {
            one.checkedBytes += static_cast<uint64_t>(item);
            const bool padding = name.empty();
            uint64_t cast = 0;
            if (param.stored() && !padding && tensor.known(element)) {
              std::memcpy(&cast, tensor.at(element, itemBytes(param.dtype())), static_cast<size_t>(itemBytes(param.dtype())));
              cast = castCode(param, cast);
            }
            if ((padding || tensor.known(element)) &&
                std::memcmp(at, padding ? zeros : param.stored() ? reinterpret_cast<const std::byte *>(&cast) : tensor.at(element, item), static_cast<size_t>(item)) == 0)
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
        result.checkedBytes += one.checkedBytes;
        result.mismatches += one.mismatches;
        if (result.first.empty())
          result.first = std::move(one.first);
      },
      progress);
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
        Gathered tensor;
        uint64_t compared = 0;
        for (size_t h = 0; h < holders.size(); ++h) {
          int64_t differs = -1; // the first such element
          forEachElement(plan, *holders[h], name, [&](const std::byte *at, int64_t element, int64_t item) {
            if (!tensor.known(element)) {
              std::memcpy(tensor.at(element, item), at, static_cast<size_t>(item));
              tensor.know(element);
              return;
            }
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
  return result;
}

} // namespace reshard::tools
