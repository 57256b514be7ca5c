// SPDX-License-Identifier: Apache-2.0
// The rendezvous of a job's processes over any store, which may have keys of earlier attempts.
//
// Each process has a token, a random number. Rank r sets `hello/r`. Rank 0 looks at all hellos, and sets `welcome/r`
// with its session and the token that it has read. A rank that finds its own token there sets `answer/r` with both,
// which proves that it runs. After all answers rank 0 sets `roster` with the tokens of all ranks: a process that finds
// its own token in it has joined. A process that restarts meanwhile sets its hello anew, and rank 0 welcomes it anew.
// If rank 0 refuses the job or its deadline approaches, the roster has the reason, and all processes fail with it, also
// those that say hello in the 5 s after.
//
// The keys begin with `reshard/JOB/DIGEST OF THE PLAN/`, so that jobs of another name or plan do not meet. Each process
// also sets `reshard/JOB/plan/r`. If a rank finds that rank 0 has another plan, it sets `reshard/JOB/differs/r` with
// the tokens of both, which proves that it runs at the same time. If it does not say hello within a second all the
// same, rank 0 refuses the job, and sets `reshard/JOB/refusal/r`, which a process of any plan finds. A process that
// fails before it joins does as one with another plan, and sets its reason as `reshard/JOB/failure/r`.
#pragma once

#include "executor/rendezvous/records.h"
#include "executor/rendezvous/rendezvous.h"
#include "executor/rendezvous/store.h"

#include <string>
#include <utility>

namespace reshard {

struct JobOptions {
  std::string name;            // may be empty
  std::string plan;            // its digest
  uint32_t rank = 0, size = 1; // size 0: not known, for reportFailure
  Authenticator authenticator;
};

/// What this process says about itself, with a new token.
Hello helloOfThisProcess();
/// The beginning of all keys of a job.
std::string jobPrefix(const std::string &name);
/// Sets the plan that this process, with a token, has opened as its rank.
Status announcePlan(Store &store, const JobOptions &job, uint64_t token, const Deadline &deadline);
/// " (rank 3 has opened plan X, …)" if another rank has opened another plan; else empty.
std::string planNoteOf(Store &store, const JobOptions &job, uint32_t rank, const Deadline &deadline);
/// As rank 0, over a store that another job serves, at which the other ranks of this job wait: tells them why the job
/// fails, until all know or the deadline has passed.
void refuseJob(Store &store, const JobOptions &job, const Status &reason, const Deadline &deadline);
/// Tells the other ranks of a job why this process will not join: its plan may be unknown. Returns when rank 0 knows,
/// or as rank 0 when all know, but after 5 s or at the deadline at the latest.
void reportFailure(Store &store, const JobOptions &job, const Status &reason, const Deadline &deadline);
/// As long as for processes of one launch to start; not beyond the deadline.
Deadline launchDeadline(const Deadline &deadline);
/// The deadline of a lookup that explains a failure whose deadline has passed.
Deadline shortly();

class StoreRendezvous : public Rendezvous {
public:
  /// The store must outlive it.
  StoreRendezvous(Store &store, JobOptions options) : store_(store), options_(std::move(options)) {}

  uint32_t rank() const override { return options_.rank; }
  uint32_t size() const override { return options_.size; }
  uint64_t session() const override { return roster_.session; }
  Status join(std::string_view hello, const Deadline &deadline) override;
  /// Whether join was called: it tells the others of a failure itself.
  bool begun() const { return begun_; }
  Result<std::string> hello(uint32_t rank, const Deadline &deadline) override;

private:
  Store &store_;
  const JobOptions options_;
  bool begun_ = false;
  Roster roster_; // after join
};

} // namespace reshard
