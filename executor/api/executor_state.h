// SPDX-License-Identifier: Apache-2.0
// The state of an executor, for the functions of the C API.
#pragma once

#include "executor/api/connect_job.h"
#include "executor/api/status_of.h"
#include "executor/api/transforms.h"
#include "executor/digests/run_digests.h"
#include "executor/memory/bindings.h"
#include "executor/memory/view_jobs.h"
#include "executor/pull/pull_transport.h"
#include "executor/transports/transport.h"
#include "reshard/reshard.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <sys/types.h>
#include <unistd.h>
#include <vector>

namespace reshard {

/// The options of reshard_open, which reshard_replace uses again: with copies of the texts, without the caller's
/// objects.
class KeptOptions {
public:
  KeptOptions() = default;
  KeptOptions(const KeptOptions &) = delete;
  KeptOptions &operator=(const KeptOptions &) = delete;

  /// `options` has the library's size.
  void keep(const reshard_options &options) {
    options_ = options;
    for (const char **text :
         {&options_.transport, &options_.device, &options_.rendezvous, &options_.job, &options_.secret})
      if (*text)
        *text = texts_.emplace_back(*text).c_str();
    options_.store = nullptr; // valid only during reshard_open
    options_.communicator = nullptr;
  }
  const reshard_options &get() const { return options_; }

private:
  reshard_options options_ = RESHARD_OPTIONS_INITIALIZER;
  std::deque<std::string> texts_; // a deque, since the options have pointers to them
};

struct Hook {
  reshard_hook call = nullptr;
  void *user = nullptr;
};

/// A hook to call after a run, with its rank.
struct Refresh {
  std::string name;
  uint32_t rank = 0;
};

/// By (endpoint, world rank or file number).
using Bindables = std::map<std::pair<uint32_t, uint32_t>, Bindable>;

/// What reshard_digest and checked calls have returned, which is valid until the next such call.
struct DigestAnswer {
  std::vector<SideDigest> tensors;
  std::vector<std::string> texts;       // their digests
  std::vector<std::byte> elements;      // reshard_tensor_digest, of the caller's size
  std::vector<const char *> undigested; // texts of `digests`
};

} // namespace reshard

struct reshard_executor {
  const pid_t process = ::getpid(); // the one that has opened it
  bool busy = false;                // a call is in progress
  bool closedInside = false;        // a hook of that call has called reshard_close
  reshard::Interrupt interrupt;     // outlives the transport
  reshard::KeptOptions options;
  const reshard::TransportTraits *traits = nullptr; // the row of `transport`; null: the options are not right
  std::unique_ptr<reshard::Plan> plan;
  std::vector<uint32_t> ranks;
  reshard::Bindables bindables;
  std::vector<reshard::LocalRank> locals;
  std::vector<reshard::ViewJobs> viewJobs; // by local rank
  reshard::Transforms transforms;
  std::vector<reshard::BoundRange> ranges;
  std::map<std::string, reshard::Hook> hooks;
  std::vector<reshard::Refresh> refreshes; // in the order of ranks, then of params
  reshard::JobConnection job;              // outlives the transport, whose backend uses it
  std::unique_ptr<reshard::Transport> transport;
  std::optional<reshard::pull::Fleet> fleet;    // in pull mode
  reshard::pull::PullTransport *pull = nullptr; // `transport` in pull mode
  double joinSeconds = 0;
  bool prepared = false;
  bool broken = false;     // Transport::prepare failed part way
  reshard::Status unready; // the last error of bind or prepare before the processes prepare together
  reshard_state state = RESHARD_EMPTY;
  uint64_t version = 0;
  uint64_t pulls = 0; // pulls that have written the memory
  std::string error;
  std::unique_ptr<reshard::RunDigests> digests; // from the first digest of this plan on
  reshard::DigestAnswer answer;

  /// Whether this process can use it. A forked process cannot: it has no threads of it, and its connections are those
  /// of the other process.
  bool here() const { return process == ::getpid(); }
  /// The deadline of the call in progress.
  reshard::Deadline deadlineIn(double seconds) { return reshard::deadlineIn(seconds, &interrupt); }

  /// Calls the hooks that follow a run: `finalize` of transforms, then `refresh`.
  reshard::Status refresh() {
    if (reshard::Status status = transforms.finalize(); !status.ok())
      return status;
    for (const reshard::Refresh &refresh : refreshes)
      if (const reshard::Hook &hook = hooks[refresh.name];
          hook.call(hook.user, refresh.name.c_str(), refresh.rank) != 0)
        return reshard::failed("the hook '" + refresh.name + "' failed on rank " + std::to_string(refresh.rank));
    return {};
  }

  reshard::Bindable &bindable(uint32_t endpoint, uint32_t meshRank, uint32_t key) {
    const auto [at, added] = bindables.try_emplace({endpoint, key});
    if (added)
      at->second = reshard::bindableOf(*plan, endpoint, meshRank);
    return at->second;
  }
};

namespace reshard {

/// Whether a call may begin.
inline Status mayCall(const reshard_executor &e) {
  if (!e.here())
    return invalid("process " + std::to_string(e.process) + " opened the executor, and this is process " +
                   std::to_string(::getpid()) +
                   ", which was forked from it: only the process that opened an executor can use it; open one here, or "
                   "start this process in another way (multiprocessing: 'spawn')");
  return e.busy ? invalid("another call of this executor is in progress: a hook must not call its executor, and only "
                          "one thread may at a time")
                : Status();
}

/// Marks that a call is in progress.
class CallInProgress {
public:
  explicit CallInProgress(reshard_executor &e) : executor_(e) {
    e.busy = true;
    e.closedInside = false;
    e.interrupt.begin();
  }
  ~CallInProgress() { executor_.busy = false; }
  CallInProgress(const CallInProgress &) = delete;
  CallInProgress &operator=(const CallInProgress &) = delete;

  /// The call's result: its own, unless a hook has closed the executor.
  Status result(Status own) {
    if (executor_.interrupt.raised() && !own.ok())
      own = std::move(own).withPrefix("interrupted: ");
    if (!executor_.closedInside)
      return own;
    if (executor_.state == RESHARD_COMPLETE)
      executor_.state = RESHARD_TORN;
    return failed(
        "a hook has called reshard_close during the call; the executor is still open: close it after the call" +
        (own.ok() ? "" : "; " + own.message()));
  }

private:
  reshard_executor &executor_;
};

/// The body of a function of the C API: it keeps the text of its error, and no exception leaves it.
template <class Body> reshard_status guarded(reshard_executor *executor, Body body) {
  if (!executor)
    return RESHARD_INVALID;
  try {
    executor->error.clear();
    Status status = mayCall(*executor);
    if (status.ok()) {
      CallInProgress call(*executor);
      status = call.result(body(*executor));
    }
    executor->error = status.message();
    return statusOf(status);
  } catch (const std::bad_alloc &) {
    executor->error = "out of memory";
  } catch (const std::exception &exception) {
    executor->error = exception.what();
  }
  return RESHARD_FAILED;
}

/// The digests of the executor's plan and memory. It is prepared.
RunDigests &digestsOf(reshard_executor &e);
/// Keeps the names that reshard_undigested returns.
void keepUndigested(reshard_executor &e);

/// The options of a check, of a caller of any version.
Result<CheckOptions> checkOptionsOf(const reshard_check &check);

/// Moves every byte, and calls the hooks around it. `check`, if given, is called when all bytes have arrived, before
/// the hooks that follow. Its error, like any other, leaves the targets torn.
Status runOnce(reshard_executor &e, const Deadline &deadline, const std::function<Status()> &check = {});
/// runOnce(), with a check by digests.
Status checkedRun(reshard_executor &e, const reshard_check &check, const Deadline &deadline);

} // namespace reshard
