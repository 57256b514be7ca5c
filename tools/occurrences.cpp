#include "tools/occurrences.h"

namespace reshard::tools {

using namespace schema;

Occurrences occurrences(const Plan &plan, const Memory &memory) {
  return occurrences(plan, memory.places(), [](const PlaceMemory &place, uint32_t param, uint32_t instance) {
    return place.params[param][instance] != nullptr;
  });
}

Occurrences occurrences(const Plan &plan, const std::vector<PlaceMemory> &places,
                        const std::function<bool(const PlaceMemory &, uint32_t, uint32_t)> &accept) {
  Occurrences result;
  for (const PlaceMemory &place : places) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(place.endpoint);
    for (uint32_t p = 0; p < place.params.size(); ++p)
      for (ParamInstance &instance : instances(plan.manifest(), endpoint, p, place.place)) {
        if (!accept(place, p, instance.instance))
          continue;
        const auto occurrence = std::make_shared<const Occurrence>(Occurrence{&place, std::move(instance)});
        std::string last;
        forEachRun(plan.manifest(), endpoint, p, place.place, occurrence->instance, [&](const ElementRun &run) {
          const std::string name = run.tensor ? *run.tensor : "";
          if (name == last && !name.empty())
            return;
          last = name;
          auto &list = result[name];
          if (list.empty() || list.back() != occurrence)
            list.push_back(occurrence);
        });
      }
  }
  return result;
}

std::string nameOf(const Plan &plan, const Occurrence &occurrence) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(occurrence.place->endpoint);
  return (endpoint.storage() ? "file " : "rank ") + std::to_string(endpoint.ranks()->Get(occurrence.place->place)) +
         " param '" + occurrence.instance.name + "'";
}

} // namespace reshard::tools
