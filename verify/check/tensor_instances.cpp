// SPDX-License-Identifier: Apache-2.0
#include "verify/check/tensor_instances.h"

#include "base/work_deadline.h"

#include <map>
#include <tuple>

namespace reshard::verify {

using namespace schema;

TensorInstances::TensorInstances(const Plan &plan, const RankMemories &rankMemories)
    : TensorInstances(
          plan, rankMemories,
          [](const MeshRankMemory &memory, uint32_t param, uint32_t instance) {
            return memory.params[param][instance] != nullptr;
          },
          [](uint32_t) { return false; }) {}

TensorInstances::TensorInstances(const Plan &plan, const RankMemories &rankMemories, const Accept &accept,
                                 const std::function<bool(uint32_t param)> &once) {
  std::map<uint32_t, std::map<uint32_t, const MeshRankMemory *>> memories; // by endpoint and mesh rank
  for (const MeshRankMemory &each : rankMemories)
    memories[each.endpoint][each.meshRank] = &each;
  std::map<std::string, std::vector<TensorInstance>> byName;
  for (const auto &[number, byMeshRank] : memories) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(number);
    const auto covers = [&, &byMeshRank = byMeshRank](uint32_t param, uint32_t meshRank) {
      const auto at = byMeshRank.find(meshRank);
      int64_t left = at == byMeshRank.end() ? 0 : instanceCount(endpoint, *endpoint.params()->Get(param), meshRank);
      while (left > 0 && !accept(*at->second, param, static_cast<uint32_t>(left - 1)))
        --left;
      return left > 0;
    };
    const Holdings &held = holdings_.emplace_back(holdingsOf(plan.manifest(), number, covers, true));
    std::vector<std::shared_ptr<const std::vector<ParamInstance>>> ofClass;
    for (const RankClass &each : held.classes)
      ofClass.push_back(std::make_shared<const std::vector<ParamInstance>>(
          instances(plan.manifest(), endpoint, each.param, each.meshRanks[0])));
    for (const HeldTensor &tensor : held.tensors)
      for (auto at = tensor.holdings.begin(), end = at; at != tensor.holdings.end(); at = end) {
        const auto &[rankClass, instance, number, grid] = held.items[*at];
        while (end != tensor.holdings.end() && held.items[*end].rankClass == rankClass &&
               held.items[*end].instance == instance)
          ++end;
        const uint32_t param = held.classes[rankClass].param;
        for (const uint32_t meshRank : held.classes[rankClass].meshRanks) {
          WorkDeadline::spend(1);
          const MeshRankMemory *memory = byMeshRank.at(meshRank);
          if (!accept(*memory, param, instance))
            continue;
          const std::shared_ptr<const ParamInstance> one(ofClass[rankClass], &(*ofClass[rankClass])[instance]);
          byName[*tensor.name].push_back({memory, one, &held, {at, end}});
          if (once(param))
            break;
        }
      }
  }
  const auto order = [](const TensorInstance &each) {
    return std::tuple(each.rankMemory, each.instance->param, each.instance->instance);
  };
  for (auto &[name, list] : byName) {
    std::sort(list.begin(), list.end(),
              [&](const TensorInstance &a, const TensorInstance &b) { return order(a) < order(b); });
    all_.emplace_back(name, std::move(list));
  }
}

std::span<const TensorInstance> TensorInstances::of(const std::string &name) const {
  const auto at = std::lower_bound(all_.begin(), all_.end(), name,
                                   [](const auto &entry, const std::string &wanted) { return entry.first < wanted; });
  return at == all_.end() || at->first != name ? std::span<const TensorInstance>() : at->second;
}

InstanceLayout layoutOf(const Plan &plan, const TensorInstance &held) {
  const MeshRankMemory &memory = *held.rankMemory;
  return {plan.manifest(), *plan.manifest().endpoints()->Get(memory.endpoint), memory.meshRank, *held.instance};
}

void forEachGridIn(const TensorInstance &held, const std::function<void(PartGrid &)> &visit) {
  for (const uint32_t part : held.parts) {
    WorkDeadline::spend(8);
    PartGrid grid = held.holdings->items[part].grid;
    grid.collapse();
    visit(grid);
  }
}

void forEachRangeIn(const TensorInstance &held, const std::function<void(const ElementRange &)> &visit) {
  forEachGridIn(held, [&](const PartGrid &grid) {
    forEachRangeOf(grid, [&](const ElementRange &range) {
      WorkDeadline::spend(range.count);
      visit(range);
    });
  });
}

std::string nameOf(const Plan &plan, const TensorInstance &held) {
  const InstanceLayout layout = layoutOf(plan, held);
  return meshRankName(layout.endpoint, layout.meshRank) + " param '" +
         instances(layout.manifest, layout.endpoint, held.instance->param, layout.meshRank)[held.instance->instance]
             .name +
         "'";
}

} // namespace reshard::verify
