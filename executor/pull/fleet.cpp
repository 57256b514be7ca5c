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

Directory::Directory(Store &store, JobOptions job) : store_(store), job_(std::move(job)), own_(helloOfThisProcess()) {}

std::string Directory::key(uint32_t worldRank) const {
  return jobPrefix(job_.name) + job_.plan + "/pool/" + std::to_string(worldRank);
}

Status Directory::enter(const std::string &address, const Deadline &deadline) {
  own_.content = address;
  if (Status status = announcePlan(store_, job_, own_.token, deadline); !status.ok())
    return status;
  return store_.set(key(job_.rank), seal(job_.authenticator, key(job_.rank), own_.encode()), deadline);
}

Result<std::optional<ServerAddress>> Directory::find(uint32_t worldRank, const Deadline &deadline) {
  const Result<std::optional<std::string>> value = store_.find(key(worldRank), deadline);
  if (!value.ok())
    return value.status();
  problem_.clear();
  if (!*value)
    return std::optional<ServerAddress>();
  const std::optional<Unsealed> unsealed = unseal(job_.authenticator, key(worldRank), **value);
  const std::optional<Hello> hello = unsealed ? Hello::decode(unsealed->record) : std::nullopt;
  if (!hello)
    problem_ = " (its record in the store is damaged)";
  else if (!unsealed->problem.empty())
    problem_ = " (its record in the store " + unsealed->problem + ")";
  else if (hello->version != kRecordVersion)
    problem_ = " (" + hello->who() + " has reshard " + hello->library + ", this process has " + own_.library + ")";
  if (!problem_.empty())
    return std::optional<ServerAddress>();
  return std::optional(ServerAddress{hello->token, hello->content});
}

std::string Directory::note(uint32_t worldRank) {
  return problem_.empty() ? planNoteOf(store_, job_, worldRank, shortly()) : problem_;
}

} // namespace reshard::pull
