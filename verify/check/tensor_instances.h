// SPDX-License-Identifier: Apache-2.0
// Finds the elements of each tensor in the memory of an endpoint, through the layouts of the manifest.
#pragma once

#include "base/parallel.h"
#include "executor/load/load.h"
#include "schema/element_ranges.h"
#include "verify/layout/mesh_rank_memory.h"
#include "verify/layout/quantized_views.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace reshard::analysis {

/// One instance of a param that holds elements of a tensor.
struct TensorInstance {
  const MeshRankMemory *rankMemory;
  schema::ParamInstance instance;
};

/// The instances with memory that hold elements of each tensor, by its full name; "": padding.
using InstancesByTensor = std::map<std::string, std::vector<std::shared_ptr<const TensorInstance>>>;
InstancesByTensor instancesByTensor(const Plan &plan, const RankMemories &rankMemories);
/// Only instances for which accept(mesh rank memory, param, instance) is true.
InstancesByTensor instancesByTensor(const Plan &plan, const RankMemories &rankMemories,
                                    const std::function<bool(const MeshRankMemory &, uint32_t, uint32_t)> &accept);

schema::InstanceLayout layoutOf(const Plan &plan, const TensorInstance &tensorInstance);
inline std::byte *memoryOf(const TensorInstance &tensorInstance) {
  return tensorInstance.rankMemory->params[tensorInstance.instance.param][tensorInstance.instance.instance];
}

/// "rank 3 param 'x'".
std::string nameOf(const Plan &plan, const TensorInstance &tensorInstance);

/// Calls visit(grid) for the parts of an instance that hold elements of a tensor, or padding if `name` is empty. The
/// grids refer to `name` and are collapsed.
void forEachGridIn(const Plan &plan, const TensorInstance &tensorInstance, const std::string &name,
                   const std::function<void(schema::PartGrid &)> &visit);
/// The same for their elements, in the order of the tensor.
void forEachRangeIn(const Plan &plan, const TensorInstance &tensorInstance, const std::string &name,
                    const std::function<void(const schema::ElementRange &)> &visit);

/// Calls work(layout) on several threads for every instance of a param with memory, and of a quantized view whose base
/// params have memory.
template <class Work>
void forEachInstance(const Plan &plan, const MeshRankMemory &memory, unsigned threads, Work work) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
  std::vector<schema::ParamInstance> items;
  for (uint32_t p = 0; p < memory.params.size(); ++p) {
    const schema::QuantizedView *view = endpoint.params()->Get(p)->view();
    const std::vector<uint32_t> needed = view ? baseParams(*view) : std::vector<uint32_t>{p};
    for (schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, memory.meshRank))
      if (std::all_of(needed.begin(), needed.end(),
                      [&](uint32_t n) { return memory.params[n][instance.instance] != nullptr; }))
        items.push_back(std::move(instance));
  }
  parallelFor(items.size(), threads,
              [&](size_t i) { work(schema::InstanceLayout{plan.manifest(), endpoint, memory.meshRank, items[i]}); });
}

} // namespace reshard::analysis
