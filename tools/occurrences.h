// Where the elements of each tensor stand in the memory of an endpoint, through the layouts of the manifest.
#pragma once

#include "tools/memory.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace reshard::tools {

/// One instance of a param that holds something of a tensor.
struct Occurrence {
  const PlaceMemory *place;
  schema::ParamInstance instance;
};

/// The instances that hold something of each tensor, by its full name; "": of padding.
using Occurrences = std::map<std::string, std::vector<std::shared_ptr<const Occurrence>>>;
Occurrences occurrences(const Plan &plan, const Memory &memory);
/// Of those instances for which accept(place, param, instance).
Occurrences occurrences(const Plan &plan, const std::vector<PlaceMemory> &places,
                        const std::function<bool(const PlaceMemory &, uint32_t, uint32_t)> &accept);

/// "rank 3 param 'x'".
std::string nameOf(const Plan &plan, const Occurrence &occurrence);

/// Calls visit(memory of the element, its row-major number in the tensor, bytes of an element) for all elements of a
/// tensor (or of padding: number 0 and up, without meaning) in an instance.
template <class Visit>
void forEachElement(const Plan &plan, const Occurrence &occurrence, const std::string &tensor, Visit visit) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(occurrence.place->endpoint);
  const int64_t item = schema::itemBytes(schema::storedType(*endpoint.params()->Get(occurrence.instance.param)));
  std::byte *memory = occurrence.place->params[occurrence.instance.param][occurrence.instance.instance];
  forEachRun(plan.manifest(), endpoint, occurrence.instance.param, occurrence.place->place, occurrence.instance,
             [&](const ElementRun &r) {
               if (r.tensor ? *r.tensor == tensor : tensor.empty())
                 for (int64_t k = 0; k < r.count; ++k)
                   visit(memory + (r.local + k * r.localStep) * item, r.logical + k * r.logicalStep, item);
             });
}

} // namespace reshard::tools
