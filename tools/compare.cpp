// Target memory against source memory, through the layouts of the manifest: every tensor is put together from the source's runs and
// looked up by the target's.

#include "tools/memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace reshard::tools {

namespace {

using namespace schema;

struct Occurrence {
  const PlaceMemory *place;
  ParamInstance instance;
};

struct Occurrences {
  int64_t elements = 0, item = 0;
  std::vector<std::shared_ptr<Occurrence>> source, target;
};

using Index = std::map<std::string, Occurrences>;

/// Which instances hold something of which tensor.
void collect(const Plan &plan, const Memory &memory, bool target, Index &index) {
  for (const PlaceMemory &place : memory.places()) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(place.endpoint);
    for (uint32_t p = 0; p < place.params.size(); ++p)
      for (ParamInstance &instance : instances(plan.manifest(), endpoint, p, place.place)) {
        if (!place.params[p][instance.instance])
          continue;
        const auto occurrence = std::make_shared<Occurrence>(Occurrence{&place, std::move(instance)});
        std::string last;
        forEachRun(plan.manifest(), endpoint, p, place.place, occurrence->instance, [&](const ElementRun &run) {
          const std::string name = run.tensor ? *run.tensor : "";
          if (name == last && !name.empty())
            return;
          last = name;
          auto &list = target ? index[name].target : index[name].source;
          if (list.empty() || list.back() != occurrence)
            list.push_back(occurrence);
        });
      }
  }
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
  const Manifest &manifest = plan.manifest();
  Index index;
  collect(plan, source, false, index);
  collect(plan, target, true, index);
  std::vector<std::pair<const std::string *, const Occurrences *>> work;
  for (const auto &[name, occurrences] : index)
    if (!occurrences.target.empty())
      work.emplace_back(&name, &occurrences);

  CheckResult result;
  std::mutex mutex;
  std::atomic<size_t> next{0};
  auto run = [&](bool reports) {
    std::vector<std::byte> tensor;
    for (size_t i = next++; i < work.size(); i = next++) {
      if (reports && progress)
        progress(static_cast<double>(i) / static_cast<double>(work.size()));
      const auto &[name, occurrences] = work[i];
      uint64_t checked = 0, mismatches = 0;
      std::string first;
      tensor.clear();
      auto visit = [&](const Occurrence &occurrence, auto body) {
        const Endpoint &endpoint = *manifest.endpoints()->Get(occurrence.place->endpoint);
        const int64_t item = itemBytes(endpoint.params()->Get(occurrence.instance.param)->dtype());
        std::byte *memory = occurrence.place->params[occurrence.instance.param][occurrence.instance.instance];
        forEachRun(manifest, endpoint, occurrence.instance.param, occurrence.place->place, occurrence.instance, [&](const ElementRun &r) {
          if ((r.tensor ? *r.tensor : std::string()) == *name)
            for (int64_t k = 0; k < r.count; ++k)
              body(memory + (r.local + k * r.localStep) * item, r.logical + k * r.logicalStep, item);
        });
      };
      for (const auto &occurrence : occurrences->source)
        if (!name->empty())
          visit(*occurrence, [&](const std::byte *at, int64_t logical, int64_t item) {
            if (tensor.size() < static_cast<size_t>((logical + 1) * item))
              tensor.resize(static_cast<size_t>((logical + 1) * item) * 3 / 2);
            std::memcpy(tensor.data() + logical * item, at, static_cast<size_t>(item));
          });
      const std::byte zeros[8] = {};
      for (const auto &occurrence : occurrences->target)
        visit(*occurrence, [&](const std::byte *at, int64_t logical, int64_t item) {
          checked += static_cast<uint64_t>(item);
          const bool held = name->empty() || tensor.size() >= static_cast<size_t>((logical + 1) * item);
          const std::byte *expected = name->empty() || !held ? zeros : tensor.data() + logical * item;
          if (held && std::memcmp(at, expected, static_cast<size_t>(item)) == 0)
            return;
          ++mismatches;
          if (first.empty())
            first = "param '" + occurrence->instance.name + "': " + (name->empty() ? "padding is not zero" : "tensor '" + *name + "' element " + std::to_string(logical) + " differs from the source");
        });
      std::lock_guard lock(mutex);
      result.checkedBytes += checked;
      result.mismatches += mismatches;
      if (result.first.empty())
        result.first = std::move(first);
    }
  };
  std::vector<std::thread> helpers;
  for (unsigned t = 1; t < threads; ++t)
    helpers.emplace_back(run, false);
  run(true);
  for (std::thread &helper : helpers)
    helper.join();
  checkCover(plan, target, result);
  return result;
}

} // namespace reshard::tools
