// SPDX-License-Identifier: Apache-2.0
// The functions of the C API that compute digests.

#include "executor/api/executor_state.h"
#include "executor/api/struct_size.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

using namespace reshard;

namespace {

/// Fails, with kind `invalid`, unless a function may be called in which all processes take part.
Status checkTogether(const reshard_executor &e, const char *function) {
  if (!e.prepared)
    return invalid(std::string(function) + " before prepare");
  return e.pull
             ? invalid(std::string(function) + " in pull mode, in which processes join and leave; expected a checked "
                                               "publish and pull")
             : Status();
}

/// Files belong to no process.
Status checkStorage(const reshard_executor &e, uint32_t endpoint) {
  const schema::Endpoint &at = *e.plan->manifest().endpoints()->Get(endpoint);
  return at.storage() && e.traits->processes
             ? invalid("found files as " + at.role()->str() + ", of which digests need transport " +
                       oneOf(transportNames(std::not_fn(&TransportTraits::processes))) +
                       "; reshard-digest computes those of files")
             : Status();
}

} // namespace

RunDigests &reshard::digestsOf(reshard_executor &e) {
  if (!e.digests) {
    const bool all = !e.traits->processes; // ranks; else each process has one
    const unsigned own = e.options.get().threads ? e.options.get().threads : std::thread::hardware_concurrency();
    e.digests = std::make_unique<RunDigests>(DigestMemory{
        .plan = *e.plan,
        .transport = *e.transport,
        .threads = all && !e.traits->recorded() ? std::max(1u, own) : 1,
        .local =
            [&e](uint32_t endpoint, uint32_t meshRank) {
              const schema::Endpoint &at = *e.plan->manifest().endpoints()->Get(endpoint);
              return at.storage() || std::any_of(e.ranks.begin(), e.ranks.end(), [&](uint32_t rank) {
                       return (e.fleet ? e.fleet->planRank(rank) : rank) == at.ranks()->Get(meshRank);
                     });
            },
        .bound = [&e](uint32_t endpoint, uint32_t meshRank, uint32_t param, uint32_t instance) -> const std::byte * {
          const schema::Endpoint &at = *e.plan->manifest().endpoints()->Get(endpoint);
          const auto found = e.bindables.find({endpoint, at.ranks()->Get(meshRank)});
          return found == e.bindables.end() ? nullptr
                                            : found->second.pointers[found->second.firstInstance[param] + instance];
        }});
  }
  return *e.digests;
}

void reshard::keepUndigested(reshard_executor &e) {
  e.answer.undigested.clear();
  for (const std::string &name : e.digests->undigested())
    e.answer.undigested.push_back(name.c_str());
}

Result<CheckOptions> reshard::checkOptionsOf(const reshard_check &check) {
  reshard_check own = RESHARD_CHECK_INITIALIZER;
  if (Status status = readStruct(&check, own); !status.ok())
    return status;
  return CheckOptions{
      .firstIndex = own.first_index != 0, .changed = own.changed != 0, .allowUndigested = own.allow_undigested != 0};
}

Status reshard::checkedRun(reshard_executor &e, const reshard_check &check, const Deadline &deadline) {
  const Result<CheckOptions> options = checkOptionsOf(check);
  if (!options.ok())
    return options.status();
  if (Status status = checkTogether(e, "a checked run"); !status.ok())
    return status;
  for (uint32_t endpoint = 0; endpoint < e.plan->manifest().endpoints()->size(); ++endpoint)
    if (Status status = checkStorage(e, endpoint); !status.ok())
      return status;
  RunDigests &digests = digestsOf(e);
  Status status = digests.expect(*options, deadline);
  keepUndigested(e);
  return status.ok() ? runOnce(e, deadline, [&] { return digests.compare(deadline); }) : status;
}

reshard_status reshard_digest(reshard_executor *executor, uint32_t endpoint, int allow_undigested,
                              double timeout_seconds, size_t element_size, const reshard_tensor_digest **digests,
                              size_t *count) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!digests || !count || !validSize(kPublicStruct<reshard_tensor_digest>, element_size) ||
        element_size % alignof(reshard_tensor_digest) != 0)
      return invalid("found no place for the digests, expected an array and a count of reshard_tensor_digest");
    if (Status status = checkTogether(e, "digest"); !status.ok())
      return status;
    if (const uint32_t known = e.plan->manifest().endpoints()->size(); endpoint >= known)
      return invalid("there is no endpoint " + std::to_string(endpoint) + ", the plan has " + std::to_string(known));
    if (Status status = checkStorage(e, endpoint); !status.ok())
      return status;
    Result<std::vector<SideDigest>> found =
        digestsOf(e).side(endpoint, allow_undigested != 0, e.deadlineIn(timeout_seconds));
    keepUndigested(e);
    if (!found.ok())
      return found.status();
    DigestAnswer &answer = e.answer;
    answer.tensors = std::move(*found);
    answer.texts.clear();
    for (const SideDigest &each : answer.tensors)
      answer.texts.push_back(each.whole() ? each.sum.digest.text() : "");
    answer.elements.assign(answer.tensors.size() * element_size, std::byte{0});
    for (size_t i = 0; i < answer.tensors.size(); ++i) {
      const SideDigest &each = answer.tensors[i];
      const reshard_tensor_digest filled{element_size,           each.tensor.c_str(), schema::dtypeName(each.dtype),
                                         each.shape.data(),      each.shape.size(),   each.sum.elements,
                                         answer.texts[i].c_str()};
      std::memcpy(answer.elements.data() + i * element_size, &filled, std::min(element_size, sizeof filled));
    }
    *digests = reinterpret_cast<const reshard_tensor_digest *>(answer.elements.data());
    *count = answer.tensors.size();
    return {};
  });
}

const char *const *reshard_undigested(const reshard_executor *executor, size_t *count) {
  if (count)
    *count = executor && executor->here() ? executor->answer.undigested.size() : 0;
  return executor && executor->here() ? executor->answer.undigested.data() : nullptr;
}
