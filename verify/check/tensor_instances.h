// SPDX-License-Identifier: Apache-2.0
// The memory that holds the elements of each tensor: the index of holdings (schema/holdings.h), for the mesh ranks that
// a check reads.
#pragma once

#include "base/parallel.h"
#include "executor/load/load.h"
#include "schema/holdings.h"
#include "verify/layout/mesh_rank_memory.h"
#include "verify/layout/quantized_views.h"

#include <algorithm>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace reshard::verify {

/// One instance of a param on a mesh rank, and its parts that hold elements of one tensor, or padding.
struct TensorInstance {
  const MeshRankMemory *rankMemory;
  std::shared_ptr<const schema::ParamInstance> instance; // its rank class's: the name is nameOf()
  const schema::Holdings *holdings = nullptr;
  std::span<const uint32_t> parts = {}; // in `holdings`
};

/// The instances that hold elements of each tensor, in the order of rankMemories, params and instances.
class TensorInstances {
public:
  using Accept = std::function<bool(const MeshRankMemory &, uint32_t param, uint32_t instance)>;

  TensorInstances() = default;
  /// All instances with memory.
  TensorInstances(const Plan &plan, const RankMemories &rankMemories);
  /// The instances for which accept() is true; of those params for which once(param) is true, on one mesh rank of each
  /// rank class.
  TensorInstances(const Plan &plan, const RankMemories &rankMemories, const Accept &accept,
                  const std::function<bool(uint32_t param)> &once);

  /// By the tensor's full name, ascending; "": padding.
  const std::vector<std::pair<std::string, std::vector<TensorInstance>>> &all() const { return all_; }
  std::span<const TensorInstance> of(const std::string &name) const;

private:
  std::list<schema::Holdings> holdings_; // for each endpoint with memory
  std::vector<std::pair<std::string, std::vector<TensorInstance>>> all_;
};

schema::InstanceLayout layoutOf(const Plan &plan, const TensorInstance &held);
inline std::byte *memoryOf(const TensorInstance &held) {
  return held.rankMemory->params[held.instance->param][held.instance->instance];
}

/// "rank 3 param 'x'".
std::string nameOf(const Plan &plan, const TensorInstance &held);

/// Calls visit(grid) for the parts of an instance that hold elements of its tensor. The grids are collapsed.
void forEachGridIn(const TensorInstance &held, const std::function<void(schema::PartGrid &)> &visit);
/// The same for their elements, in the order of the tensor.
void forEachRangeIn(const TensorInstance &held, const std::function<void(const schema::ElementRange &)> &visit);

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

} // namespace reshard::verify
