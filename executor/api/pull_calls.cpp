// SPDX-License-Identifier: Apache-2.0
// The functions of the C API in pull mode.

#include "executor/api/executor_state.h"
#include "executor/api/struct_size.h"
#include "executor/transports/overflows.h"

#include <algorithm>
#include <cstring>

using namespace reshard;

namespace {

/// Fails, with kind `invalid`, unless a function of pull mode may be called.
Status checkPull(const reshard_executor &e, const char *function, bool source) {
  if (!e.pull)
    return invalid(std::string(function) + " needs pull mode: set options.pull");
  if (!e.prepared)
    return invalid(std::string(function) + " before prepare");
  if (e.pull->isSource() != source)
    return invalid(std::string(function) + " on " + e.fleet->name(e.ranks[0]) + ", expected a rank of " +
                   (source ? "the source" : "a replica"));
  return {};
}

Status publishVersion(reshard_executor &e, uint64_t version, bool digests) {
  if (Status status = checkPull(e, "publish", true); !status.ok())
    return status;
  std::function<Result<std::vector<CountedDigest>>()> digest;
  if (digests)
    digest = [&e] { return digestsOf(e).sourceDigests(); };
  Status status = e.pull->publish(version, [&] { return e.transforms.prepare(); }, digest);
  if (status.ok())
    e.version = version;
  return status;
}

Status pullVersion(reshard_executor &e, uint64_t minVersion, const Deadline &deadline, const pull::PullCheck *check,
                   uint64_t *version) {
  const Result<uint64_t> pulled = e.pull->pull({.minVersion = minVersion,
                                                .deadline = deadline,
                                                .beforeWriting =
                                                    [&] {
                                                      e.state = RESHARD_TORN;
                                                      Status status = clearOverflows(e.locals, *e.pull);
                                                      return status.ok() ? e.transforms.prepare() : status;
                                                    },
                                                .afterWriting =
                                                    [&] {
                                                      Status status = checkOverflows(*e.plan, e.locals, *e.pull);
                                                      if (status.ok())
                                                        status = e.refresh();
                                                      e.pulls += status.ok();
                                                      return status;
                                                    },
                                                .check = check});
  if (!pulled.ok())
    return pulled.status();
  e.state = RESHARD_COMPLETE;
  e.version = *pulled;
  if (version)
    *version = *pulled;
  return {};
}

Status checkedPull(reshard_executor &e, uint64_t minVersion, const Deadline &deadline, const reshard_check &given,
                   uint64_t *version) {
  const Result<CheckOptions> options = checkOptionsOf(given);
  if (!options.ok())
    return options.status();
  if (options->firstIndex || options->changed)
    return invalid("found first_index or changed in the check of a pull, which only a run has");
  const bool allowUndigested = options->allowUndigested;
  RunDigests &digests = digestsOf(e);
  const uint32_t meshRank = e.fleet->meshRankOf(e.ranks[0]);
  const Result<RunDigests::RankBuckets> buckets = digests.bucketsOf(meshRank, allowUndigested);
  keepUndigested(e);
  if (!buckets.ok())
    return buckets.status();
  pull::PullCheck check{.buckets = buckets->numbers, .sources = {}, .checkDigests = {}, .compare = {}};
  for (const uint32_t source : buckets->sources)
    check.sources.push_back(e.fleet->sources()[source]);
  check.checkDigests = [&](const std::vector<CountedDigest> &expected) {
    Status status = digests.checkDigests(*buckets, expected, allowUndigested);
    keepUndigested(e);
    return status;
  };
  check.compare = [&](const std::vector<CountedDigest> &expected, const std::function<void()> &poll) {
    Result<std::string> wrong = digests.compareRank(meshRank, *buckets, expected, poll, deadline);
    if (wrong.ok() && !wrong->empty())
      e.state = RESHARD_TORN;
    return wrong;
  };
  return pullVersion(e, minVersion, deadline, &check, version);
}

} // namespace

reshard_status reshard_publish(reshard_executor *executor, uint64_t version, int digests) {
  return guarded(executor, [&](reshard_executor &e) { return publishVersion(e, version, digests != 0); });
}

reshard_status reshard_release(reshard_executor *executor, double timeout_seconds) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    Status status = checkPull(e, "release", true);
    return status.ok() ? e.pull->release(e.deadlineIn(timeout_seconds)) : status;
  });
}

reshard_status reshard_pull(reshard_executor *executor, uint64_t min_version, double timeout_seconds,
                            const reshard_check *check, uint64_t *version) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (Status status = checkPull(e, "pull", false); !status.ok())
      return status;
    const Deadline deadline = e.deadlineIn(timeout_seconds);
    return check ? checkedPull(e, min_version, deadline, *check, version)
                 : pullVersion(e, min_version, deadline, nullptr, version);
  });
}

reshard_status reshard_replicas(reshard_executor *executor, reshard_replica *replicas, size_t element_size,
                                size_t capacity, size_t *count) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!e.pull || !e.prepared)
      return invalid(e.pull ? "replicas before prepare" : "replicas needs pull mode: set options.pull");
    if (!count || (!replicas && capacity > 0) || !validSize(kPublicStruct<reshard_replica>, element_size))
      return invalid(!count ? "`count` is NULL" : "found no valid array, expected elements of reshard_replica");
    const Result<std::vector<pull::ReplicaInfo>> found = e.pull->replicas(e.deadlineIn(e.joinSeconds));
    if (!found.ok())
      return found.status();
    *count = found->size();
    for (size_t i = 0; i < std::min(capacity, found->size()); ++i) {
      const pull::ReplicaInfo &info = (*found)[i];
      const reshard_replica filled{sizeof(reshard_replica),
                                   info.replica,
                                   info.ranks,
                                   info.version,
                                   static_cast<reshard_replica_state>(info.state),
                                   0};
      auto *const element = reinterpret_cast<reshard_replica *>(reinterpret_cast<char *>(replicas) + i * element_size);
      std::memcpy(element, &element_size, sizeof element_size);
      writeStruct(filled, element);
    }
    return {};
  });
}
