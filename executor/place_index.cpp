#include "executor/place_index.h"

#include <algorithm>

namespace reshard {

PlaceIndex::PlaceIndex(const schema::Manifest &manifest) {
  for (const schema::Endpoint *endpoint : *manifest.endpoints()) {
    auto &list = places_.emplace_back();
    list.reserve(endpoint->ranks()->size());
    for (uint32_t place = 0; place < endpoint->ranks()->size(); ++place)
      list.emplace_back(endpoint->ranks()->Get(place), place);
    std::sort(list.begin(), list.end());
  }
}

std::optional<uint32_t> PlaceIndex::find(uint32_t endpoint, uint32_t rank) const {
  const auto &list = places_[endpoint];
  const auto at = std::lower_bound(list.begin(), list.end(), std::pair(rank, uint32_t{0}));
  return at == list.end() || at->first != rank ? std::nullopt : std::optional(at->second);
}

} // namespace reshard
