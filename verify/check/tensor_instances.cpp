// SPDX-License-Identifier: Apache-2.0
#include "verify/check/tensor_instances.h"

#include "base/work_deadline.h"

namespace reshard::analysis {

using namespace schema;

InstancesByTensor instancesByTensor(const Plan &plan, const RankMemories &rankMemories) {
  return instancesByTensor(plan, rankMemories, [](const MeshRankMemory &rankMemory, uint32_t param, uint32_t instance) {
    return rankMemory.params[param][instance] != nullptr;
  });
}

InstancesByTensor instancesByTensor(const Plan &plan, const RankMemories &rankMemories,
                                    const std::function<bool(const MeshRankMemory &, uint32_t, uint32_t)> &accept) {
  InstancesByTensor result;
  for (const MeshRankMemory &rankMemory : rankMemories) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(rankMemory.endpoint);
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
      for (ParamInstance &instance : instances(plan.manifest(), endpoint, p, rankMemory.meshRank)) {
        if (!accept(rankMemory, p, instance.instance))
          continue;
        const auto tensorInstance =
            std::make_shared<const TensorInstance>(TensorInstance{&rankMemory, std::move(instance)});
        std::string last;
        forEachRange(layoutOf(plan, *tensorInstance), [&](const ElementRange &range) {
          const std::string name = range.tensor ? *range.tensor : "";
          if (name == last && !name.empty())
            return;
          last = name;
          auto &list = result[name];
          if (list.empty() || list.back() != tensorInstance)
            list.push_back(tensorInstance);
        });
      }
  }
  return result;
}

InstanceLayout layoutOf(const Plan &plan, const TensorInstance &tensorInstance) {
  const MeshRankMemory &memory = *tensorInstance.rankMemory;
  return {plan.manifest(), *plan.manifest().endpoints()->Get(memory.endpoint), memory.meshRank,
          tensorInstance.instance};
}

void forEachGridIn(const Plan &plan, const TensorInstance &tensorInstance, const std::string &name,
                   const std::function<void(PartGrid &)> &visit) {
  forEachCollapsedGrid(layoutOf(plan, tensorInstance), [&](const PartGrid &grid) {
    if (grid.tensor ? *grid.tensor != name : !name.empty())
      return;
    PartGrid kept = grid;
    kept.tensor = grid.tensor ? &name : nullptr; // the name of `grid` lives during this call only
    visit(kept);
  });
}

void forEachRangeIn(const Plan &plan, const TensorInstance &tensorInstance, const std::string &name,
                    const std::function<void(const ElementRange &)> &visit) {
  forEachGridIn(plan, tensorInstance, name, [&](const PartGrid &grid) {
    forEachRangeOf(grid, [&](const ElementRange &range) {
      WorkDeadline::spend(range.count);
      visit(range);
    });
  });
}

std::string nameOf(const Plan &plan, const TensorInstance &tensorInstance) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(tensorInstance.rankMemory->endpoint);
  return meshRankName(endpoint, tensorInstance.rankMemory->meshRank) + " param '" + tensorInstance.instance.name + "'";
}

} // namespace reshard::analysis
