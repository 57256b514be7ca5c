// SPDX-License-Identifier: Apache-2.0
#include "executor/pull/fleet.h"

#include <algorithm>

namespace reshard::pull {

Result<Fleet> Fleet::of(const Plan &plan) {
  const auto &endpoints = *plan.manifest().endpoints();
  if (endpoints.size() < 2 || endpoints.Get(1)->replicas() == 0)
    return invalid("pull mode needs a plan whose target has `replicas`, found none");
  // The loader has checked that it is the only target, on consecutive ranks above the source's.
  Fleet fleet;
  for (const uint32_t rank : *endpoints.Get(0)->ranks())
    fleet.sources_.push_back(rank);
  fleet.base_ = endpoints.Get(1)->ranks()->Get(0);
  fleet.replicaRanks_ = endpoints.Get(1)->ranks()->size();
  return fleet;
}

std::optional<uint32_t> Fleet::sourceMeshRank(uint32_t worldRank) const {
  const auto found = std::find(sources_.begin(), sources_.end(), worldRank);
  return found == sources_.end() ? std::nullopt : std::optional(static_cast<uint32_t>(found - sources_.begin()));
}

std::string Fleet::name(uint32_t worldRank) const {
  const std::string world = " (world rank " + std::to_string(worldRank) + ")";
  if (const std::optional<uint32_t> source = sourceMeshRank(worldRank))
    return "source rank " + std::to_string(*source) + world;
  return "replica " + std::to_string(replicaOf(worldRank)) + " rank " + std::to_string(meshRankOf(worldRank)) + world;
}

} // namespace reshard::pull
