// SPDX-License-Identifier: Apache-2.0
// Joins the processes of a run through the executor. A process that fails contributes its exit code to the next
// all-reduce, by which the others fail too.
#include "tools/run/processes.h"

namespace reshard::tools {

using namespace command;

namespace {

/// A failed process contributes this, plus its exit code and rank, to allReduceMin().
constexpr int64_t kFailed = INT64_MIN;

} // namespace

Processes::~Processes() {
  if (run_.options.traits().processes)
    guardExits(whileJoining()); // until the process ends: a thread may still wait in MPI for peers
}

reshard_options Processes::openOptions() const {
  const ExecutionOptions &given = run_.options;
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = given.transport.c_str();
  options.device = given.device.c_str();
  options.threads = run_.threads;
  options.join_seconds = given.timeout;
  options.no_local_shortcut = given.noLocalShortcut;
  options.rendezvous = given.rendezvous.empty() ? nullptr : given.rendezvous.c_str();
  options.job = given.job.c_str();
  options.insecure = given.insecure;
  return options;
}

void Processes::join() {
  const ExecutionOptions &given = run_.options;
  const reshard_options options = openOptions();
  reshard_executor *executor = nullptr;
  if (given.traits().processes)
    guardExits(whileJoining());
  const reshard_status status =
      reshard_open(given.plan.c_str(), given.rank ? &*given.rank : nullptr, given.rank ? 1 : 0, &options, &executor);
  executor_.reset(executor);
  throwOnError(status);
  guardExits(ExitPolicy::pass);
  if (given.traits().processes) {
    size_t count = 0;
    const uint32_t *ranks = reshard_ranks(executor, &count);
    ranks_.assign(ranks, ranks + count);
    reachable_ = true;
  }
}

int64_t Processes::allReduceMin(int64_t mine) {
  if (!run_.options.traits().processes || !reachable_)
    return mine;
  int64_t least = 0;
  if (const reshard_status status = reshard_all_reduce_min(executor_.get(), mine, &least); status != RESHARD_OK) {
    reachable_ = false;
    throwOnError(status, kFailure);
  }
  if (const uint64_t codeAndRank = static_cast<uint64_t>(least) - static_cast<uint64_t>(kFailed);
      codeAndRank >> 32 <= kFailure)
    throw PeerFailure{{static_cast<int>(codeAndRank >> 32),
                       "rank " + std::to_string(codeAndRank & UINT32_MAX) + " failed; see the output of that rank"}};
  return least;
}

bool Processes::agree(int64_t mine) {
  const int64_t least = allReduceMin(mine);
  return least == -allReduceMin(-mine);
}

uint64_t Processes::sum(uint64_t mine) {
  int64_t all = ranks_.empty() ? static_cast<int64_t>(mine) : 0;
  for (uint32_t rank = 0; rank < run_.plan->world() && !ranks_.empty(); ++rank) // each rank contributes in turn
    all += allReduceMin(rank == ranks_[0] ? static_cast<int64_t>(mine) : INT64_MAX);
  return static_cast<uint64_t>(all);
}

void Processes::unreachable(const std::function<void()> &work) {
  reachable_ = false;
  work();
  reachable_ = true;
}

void Processes::finish() {
  try {
    allReduceMin(0);
  } catch (const PeerFailure &) {
    throw;
  } catch (const Failure &) {
    reachable_ = false;
  }
}

int Processes::fail(int code, const std::string &reason) {
  const ExecutionOptions &given = run_.options;
  if (!executor_ && given.traits().rendezvous) { // the other processes wait in their open
    const reshard_options options = openOptions();
    if (!run_.plan || !given.rank || *given.rank < run_.plan->world()) [[maybe_unused]]
      const reshard_status sent = reshard_fail_open(given.rank ? &*given.rank : nullptr, &options, reason.c_str());
    return code;
  }
  try {
    if (!executor_ && given.traits().launched())
      join(); // the other processes join or have joined
    allReduceMin(kFailed + (static_cast<int64_t>(code) << 32 | rank()));
    return code;
  } catch (const PeerFailure &all) { // thrown whenever the others answer
    return all.code;
  } catch (const Failure &) {
    return code;
  }
}

void Processes::throwOnError(reshard_status status, std::optional<int> code) const {
  if (status == RESHARD_OK)
    return;
  const bool atRunTime = status == RESHARD_FAILED || status == RESHARD_TIMEOUT;
  throw Failure{code.value_or(atRunTime ? kFailure : kUsage), reshard_error(executor_.get())};
}

} // namespace reshard::tools
