// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/route_numbers.h"

#include "compiler/resolve/interner.h"

#include <algorithm>

namespace reshard {

using namespace ir;

RouteNumbers::RouteNumbers(const Layout &layout, const std::vector<Route> &routes) : numbers_(layout.endpoints.size()) {
  Interner<Route> byRanks;
  for (const Route &route : routes)
    for (size_t e = 1; e < layout.endpoints.size(); ++e) {
      const std::vector<int32_t> &ranks = layout.endpoints[e].ranks;
      const bool has = std::all_of(route.begin(), route.end(),
                                   [&](const Hop &hop) { return std::max(hop.from, hop.to) < std::ssize(ranks); });
      Route world;
      for (size_t hop = 0; has && hop < route.size(); ++hop)
        world.push_back({ranks[route[hop].from], ranks[route[hop].to]});
      numbers_[e].push_back(has ? static_cast<int32_t>(byRanks.intern(std::move(world))) : -1);
    }
}

} // namespace reshard
