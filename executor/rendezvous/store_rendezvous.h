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

#include <chrono>
#include <vector>

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
  StoreRendezvous(Store &store, JobOptions options);

  uint32_t rank() const override { return options_.rank; }
  uint32_t size() const override { return options_.size; }
  uint64_t session() const override { return session_; }
  Status join(std::string_view hello, const Deadline &deadline) override;
  /// Whether join was called: it tells the others of a failure itself.
  bool begun() const { return begun_; }
  Result<std::string> hello(uint32_t rank, const Deadline &deadline) override;

private:
  /// What rank 0 knows about another rank.
  struct Peer {
    uint64_t token = 0; // 0: it has said nothing
    std::chrono::steady_clock::time_point since;
    std::string who, problem; // a problem is decisive once it has answered
    bool trusted = false;     // it has this job's secret, so it can read a refusal
    bool replaced = false;    // its hello replaced another one
    bool answered = false;
    std::optional<std::chrono::steady_clock::time_point> differs; // since when it is known that it has another plan
    uint64_t refused = 0;  // the token that it has with another plan, to which the refusal was addressed
    bool informed = false; // it knows the refusal
  };

  std::string key(const char *kind, uint32_t rank) const;
  Status set(const std::string &key, const std::string &record, const Deadline &deadline);
  Result<std::optional<Unsealed>> find(const std::string &key, const Deadline &deadline);

  /// Sets this process's hello and plan.
  Status announce(std::string_view hello, const Deadline &deadline);
  /// Fails if another process has replaced this process's hello; sets it again if the store has lost it.
  Status keepHello(const Deadline &deadline);

  // Only rank 0 calls these.
  Status admit(const Deadline &deadline);
  Result<bool> poll(uint32_t rank, const Deadline &deadline);
  Status readHello(uint32_t rank, const Deadline &deadline);
  Status findOtherPlan(uint32_t rank, const Deadline &deadline);
  Status findConflict(uint32_t rank, const Deadline &deadline);
  Result<bool> findAnswer(uint32_t rank, const Deadline &deadline);
  Status refuse(Status reason, const Deadline &deadline);
  /// Tells a rank why the job fails. Returns whether it knows, or cannot read it. The roster gets the tokens of ranks
  /// that have said hello since.
  Result<bool> sendRefusal(uint32_t rank, Roster &roster, const Deadline &deadline);
  Status missing();

  // Only the other ranks call these.
  Status enter(const Deadline &deadline);
  Result<bool> pollRankZero(const Deadline &deadline);
  Status findWelcome(const Deadline &deadline);
  Result<bool> findRoster(const Deadline &deadline);
  Status findRefusal(const Deadline &deadline);
  /// Tells rank 0 that this process has another plan, if it has, and notes it.
  Status compareWithRankZero(const Deadline &deadline);

  /// What the store says about clients that were refused, and about an earlier attempt.
  std::string storeNote(const Deadline &deadline);
  /// The longest pause between polls: many ranks poll less often.
  std::chrono::milliseconds pause() const { return std::chrono::milliseconds(50 + options_.size / 10); }

  Store &store_;
  const JobOptions options_;
  const std::string prefix_;
  Hello own_;
  std::string ownRecord_; // own_, sealed
  bool begun_ = false;
  std::vector<Peer> peers_;
  Welcome answered_;     // the last welcome that this rank answered
  uint64_t differs_ = 0; // the token of the rank 0 that knows that its plan differs from this rank's
  uint64_t session_ = 0;
  std::vector<uint64_t> tokens_; // the tokens of all ranks, after join
  std::string note_; // a text about the plan of rank 0, kept since the store may end before this process's deadline
};

} // namespace reshard
