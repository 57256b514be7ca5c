#include "executor/bindings.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard {

Bindable bindableOf(const Plan &plan, uint32_t endpointNumber, uint32_t place) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(endpointNumber);
  Bindable result;
  result.role = endpoint.role()->str();
  result.place = place;
  uint32_t next = 0;
  for (uint32_t p = 0; p < (endpoint.params() ? endpoint.params()->size() : 0); ++p) {
    result.firstInstance.push_back(next);
    for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, place)) {
      if (schema::bindable(*endpoint.params()->Get(p)))
        result.names.emplace(instance.name, std::make_pair(next, static_cast<uint64_t>(instance.bytes)));
      ++next;
    }
  }
  result.pointers.assign(next, nullptr);
  return result;
}

std::string nearest(const std::string &name, const Bindable &place) {
  size_t best = name.size() / 3 + 2;
  const std::string *found = nullptr;
  size_t looked = 0;
  std::vector<size_t> row;
  for (const auto &[known, where] : place.names) {
    if (++looked > 100'000)
      break;
    if (known.size() > name.size() + best || name.size() > known.size() + best)
      continue;
    row.resize(known.size() + 1);
    for (size_t j = 0; j <= known.size(); ++j)
      row[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= known.size(); ++j) {
        const size_t above = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (name[i - 1] != known[j - 1])});
        diagonal = above;
      }
    }
    if (row.back() < best) {
      best = row.back();
      found = &known;
    }
  }
  return found ? ", did you mean '" + *found + "'?" : "";
}

std::string overlap(std::vector<Range> &ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.begin < b.begin; });
  const Range *last = nullptr, *lastTarget = nullptr; // those that reach furthest
  for (const Range &range : ranges) {
    const Range *other = range.target ? last : lastTarget;
    if (other && other->end > range.begin && range.end > range.begin)
      return other->name + " and " + range.name + " overlap in memory";
    if (!last || range.end > last->end)
      last = &range;
    if (range.target && (!lastTarget || range.end > lastTarget->end))
      lastTarget = &range;
  }
  return {};
}

} // namespace reshard
