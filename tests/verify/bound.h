// SPDX-License-Identifier: Apache-2.0
// The params of a rank that a caller of the executor binds.
#pragma once

#include "executor/load/load.h"
#include "schema/manifest.h"
#include "verify/layout/mesh_rank_memory.h"

namespace reshard::tests {

/// Calls visit(instance, memory) for each instance of a mesh rank's params that a caller binds.
template <class Visit> void forEachBound(const Plan &plan, const verify::MeshRankMemory &of, Visit visit) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(of.endpoint);
  for (uint32_t p = 0; p < of.params.size(); ++p)
    if (schema::bindable(*endpoint.params()->Get(p)))
      for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, of.meshRank))
        visit(instance, of.params[p][instance.instance]);
}

} // namespace reshard::tests
