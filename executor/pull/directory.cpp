// SPDX-License-Identifier: Apache-2.0
#include "executor/pull/directory.h"

namespace reshard::pull {

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
