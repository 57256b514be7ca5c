// SPDX-License-Identifier: Apache-2.0
// The C API that reads a plan's manifest.

#include "reshard/reshard_plan.h"

#include "executor/api/status_of.h"
#include "executor/api/struct_size.h"
#include "executor/load/load.h"
#include "schema/limits.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <tuple>

using namespace reshard;
namespace fbs = reshard::schema;

namespace {

/// The params of one mesh rank as given to the caller, and the instances to which they point.
struct RankParams {
  std::vector<fbs::ParamInstance> instances;
  std::vector<std::byte> structs; // reshard_param of the caller's size
};

const char *text(const flatbuffers::String *string) { return string ? string->c_str() : ""; }

/// `paramSize`: the size of a reshard_param in the caller's version.
RankParams listParams(const fbs::Manifest &manifest, uint32_t number, int64_t meshRank, size_t paramSize) {
  const fbs::Endpoint &endpoint = *manifest.endpoints()->Get(number);
  RankParams result;
  for (uint32_t p = 0; p < (endpoint.params() ? endpoint.params()->size() : 0); ++p)
    if (!endpoint.params()->Get(p)->view())
      for (fbs::ParamInstance &instance : fbs::instances(manifest, endpoint, p, meshRank))
        result.instances.push_back(std::move(instance));
  result.structs.resize(result.instances.size() * paramSize);
  std::byte *next = result.structs.data();
  for (const fbs::ParamInstance &instance : result.instances) {
    const fbs::Param &param = *endpoint.params()->Get(instance.param);
    const bool hook = number > 0 && !endpoint.storage(); // only ranks of targets have refresh hooks
    const reshard_param filled{paramSize,
                               instance.name.c_str(),
                               fbs::dtypeName(storageDtypeOf(param)),
                               hook ? text(param.refresh()) : "",
                               text(param.transform()),
                               instance.shape.data(),
                               instance.shape.size(),
                               static_cast<uint64_t>(instance.bytes)};
    std::memcpy(next, &filled, std::min(paramSize, sizeof filled));
    next += paramSize;
  }
  return result;
}

/// The mesh rank of a world rank (or the number of a file), in any replica of the endpoint; no value if it has none.
std::optional<uint32_t> meshRankOf(const fbs::Endpoint &endpoint, uint32_t rank) {
  const auto &ranks = *endpoint.ranks();
  const uint32_t first = ranks.Get(0);
  if (endpoint.replicas() > 0 && rank >= first && (rank - first) / ranks.size() < fbs::kMaxReplicas)
    return (rank - first) % ranks.size();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? std::nullopt : std::optional<uint32_t>(found - ranks.begin());
}

} // namespace

struct reshard_plan {
  std::unique_ptr<Plan> plan;
  std::string error;
  mutable std::mutex mutex;
  mutable std::map<std::tuple<uint32_t, uint32_t, size_t>, RankParams>
      params; // by (endpoint, mesh rank, size of a reshard_param); guarded by the mutex

  const fbs::Endpoint *endpoint(uint32_t number) const {
    return plan && number < plan->manifest().endpoints()->size() ? plan->manifest().endpoints()->Get(number) : nullptr;
  }
};

reshard_status reshard_plan_open(const char *path, reshard_plan **plan) {
  if (!plan)
    return RESHARD_INVALID;
  *plan = new (std::nothrow) reshard_plan;
  if (!*plan)
    return RESHARD_FAILED;
  try {
    const Status status = path ? Plan::open(path, (*plan)->plan) : invalid("the plan path is NULL");
    (*plan)->error = status.message();
    return statusOf(status);
  } catch (const std::exception &) {
    return RESHARD_FAILED; // out of memory
  }
}

const char *reshard_plan_error(const reshard_plan *plan) { return plan ? plan->error.c_str() : "no plan"; }

reshard_status reshard_plan_summary(const reshard_plan *plan, reshard_summary *summary) {
  if (!plan || !plan->plan || !summary)
    return RESHARD_INVALID;
  const fbs::Manifest &manifest = plan->plan->manifest();
  const reshard_summary filled{sizeof(reshard_summary),
                               plan->plan->digest().c_str(),
                               text(manifest.compiler()),
                               text(manifest.model()),
                               static_cast<uint64_t>(plan->plan->container().bytes()),
                               manifest.world(),
                               manifest.endpoints()->size(),
                               manifest.rounds(),
                               manifest.messages(),
                               manifest.transfers(),
                               manifest.bytes_target(),
                               manifest.bytes_local(),
                               manifest.bytes_remote(),
                               manifest.bytes_storage(),
                               manifest.arena_bytes()};
  return writeStruct(filled, summary) ? RESHARD_OK : RESHARD_INVALID;
}

reshard_status reshard_plan_endpoint(const reshard_plan *plan, uint32_t endpoint, reshard_endpoint *description) {
  const fbs::Endpoint *found = plan ? plan->endpoint(endpoint) : nullptr;
  if (!found || !description)
    return RESHARD_INVALID;
  const reshard_endpoint filled{sizeof(reshard_endpoint), text(found->role()),    text(found->layout()),
                                found->storage(),         found->ranks()->data(), found->ranks()->size()};
  return writeStruct(filled, description) ? RESHARD_OK : RESHARD_INVALID;
}

reshard_status reshard_plan_params(const reshard_plan *plan, uint32_t endpoint, uint32_t rank, size_t param_size,
                                   const reshard_param **params, size_t *count) {
  const fbs::Endpoint *found = plan ? plan->endpoint(endpoint) : nullptr;
  if (!found || !params || !count || !validSize(kPublicStruct<reshard_param>, param_size) ||
      param_size % alignof(reshard_param) != 0)
    return RESHARD_INVALID;
  const std::optional<uint32_t> meshRank = meshRankOf(*found, rank);
  if (!meshRank)
    return RESHARD_INVALID;
  try {
    const std::lock_guard lock(plan->mutex);
    auto at = plan->params.find({endpoint, *meshRank, param_size});
    if (at == plan->params.end())
      at = plan->params
               .emplace(std::make_tuple(endpoint, *meshRank, param_size),
                        listParams(plan->plan->manifest(), endpoint, *meshRank, param_size))
               .first;
    *params = reinterpret_cast<const reshard_param *>(at->second.structs.data());
    *count = at->second.instances.size();
    return RESHARD_OK;
  } catch (const std::exception &) {
    return RESHARD_FAILED;
  }
}

void reshard_plan_close(reshard_plan *plan) { delete plan; }
