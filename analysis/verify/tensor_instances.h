// Finds the elements of each tensor in the memory of an endpoint, through the layouts of the manifest.
#pragma once

#include "analysis/files/memory.h"

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

/// The instances that hold elements of each tensor, by its full name; "": padding.
using InstancesByTensor = std::map<std::string, std::vector<std::shared_ptr<const TensorInstance>>>;
InstancesByTensor instancesByTensor(const Plan &plan, const Memory &memory);
/// Only instances for which accept(mesh rank memory, param, instance) is true.
InstancesByTensor instancesByTensor(const Plan &plan, const std::vector<MeshRankMemory> &rankMemories,
                                    const std::function<bool(const MeshRankMemory &, uint32_t, uint32_t)> &accept);

/// "rank 3 param 'x'".
std::string nameOf(const Plan &plan, const TensorInstance &tensorInstance);

/// Calls visit(memory of the element, its row-major index in the tensor, bytes of an element) for all elements of a
/// tensor in an instance; for padding, the index has no meaning.
template <class Visit>
void forEachElement(const Plan &plan, const TensorInstance &tensorInstance, const std::string &tensor, Visit visit) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(tensorInstance.rankMemory->endpoint);
  const int64_t item =
      schema::itemBytes(schema::storageDtypeOf(*endpoint.params()->Get(tensorInstance.instance.param)));
  std::byte *memory =
      tensorInstance.rankMemory->params[tensorInstance.instance.param][tensorInstance.instance.instance];
  forEachRun(plan.manifest(), endpoint, tensorInstance.instance.param, tensorInstance.rankMemory->meshRank,
             tensorInstance.instance, [&](const ElementRun &r) {
               if (r.tensor ? *r.tensor == tensor : tensor.empty())
                 for (int64_t k = 0; k < r.count; ++k)
                   visit(memory + (r.local + k * r.localStep) * item, r.logical + k * r.logicalStep, item);
             });
}

} // namespace reshard::analysis
