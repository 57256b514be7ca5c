// SPDX-License-Identifier: Apache-2.0
// Rank 0 polls the hellos and answers of all other ranks; each other rank polls what rank 0 has set. Either side ends
// with the roster, a refusal, or its deadline.
#include "executor/rendezvous/store_rendezvous.h"

#include "base/hash.h"
#include "base/random.h"
#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/served_client.h"
#include "executor/rendezvous/store.h"

#include <algorithm>
#include <map>
#include <unistd.h>

namespace reshard {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string hostName() {
  char name[256] = "?";
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// How long a rank that has another plan than rank 0 is waited for: two jobs without names may meet at a store.
constexpr milliseconds kOtherPlan{1000};
/// In place of the digest of the plan, for a process that fails before it joins.
constexpr const char *kNoPlan = "none";
/// How many ranks a process polls that does not know the number of ranks.
constexpr uint32_t kPolledRanks = 64;
/// The most ranks of another plan that are sent a refusal.
constexpr uint32_t kMaxRefused = 1 << 16;

/// When rank 0 gives up, so that its refusal reaches the others before their own deadline: a tenth of the time earlier,
/// at most 2 s.
Deadline earlier(const Deadline &deadline) {
  if (!deadline)
    return deadline;
  const auto left = *deadline - Clock::now();
  Deadline until = *deadline - std::min<Clock::duration>(left / 10, std::chrono::seconds(2));
  until.interrupt = deadline.interrupt;
  return until;
}

std::string sameRank(uint32_t rank, const std::string &first, const std::string &second) {
  return "two processes have joined as rank " + std::to_string(rank) + ": " + first + ", and " + second +
         "; give each process its own rank, and each job its own name";
}

/// The records of a job in its store. Each is sealed.
struct JobStore {
  Store &store;
  const JobOptions &job;

  /// A key of the job with any plan.
  std::string anyKey(const char *kind, uint32_t rank) const {
    return jobPrefix(job.name) + kind + "/" + std::to_string(rank);
  }
  /// A key of the job with this plan.
  std::string key(const char *kind, uint32_t rank) const { return prefix() + kind + "/" + std::to_string(rank); }
  std::string rosterKey() const { return prefix() + "roster"; }
  std::string prefix() const { return jobPrefix(job.name) + job.plan + "/"; }

  template <class Record> Status set(const std::string &key, const Record &record, const Deadline &deadline) const {
    return store.set(key, seal(job.authenticator, key, record.encode()), deadline);
  }
  Result<std::optional<Unsealed>> find(const std::string &key, const Deadline &deadline) const {
    const Result<std::optional<std::string>> value = store.find(key, deadline);
    if (!value.ok())
      return value.status();
    return *value ? unseal(job.authenticator, key, **value) : std::nullopt;
  }
  /// A record that a process with the job's secret has made, or none.
  template <class Record>
  Result<std::optional<Record>> findRecord(const std::string &key, const Deadline &deadline) const {
    const Result<std::optional<Unsealed>> found = find(key, deadline);
    if (!found.ok())
      return found.status();
    return *found && (*found)->problem.empty() ? Record::decode((*found)->record) : std::nullopt;
  }
  Status announcePlan(const std::string &plan, uint64_t token, const Deadline &deadline) const {
    return set(anyKey("plan", job.rank), Opened{plan, token, job.size}, deadline);
  }
  /// What the store says about clients that were refused, and about an earlier attempt.
  std::string note(const Deadline &deadline) const {
    std::string note;
    if (const Result<std::optional<std::string>> found = store.find(kRefusalsKey, deadline); found.ok() && *found)
      note = "; " + **found;
    if (const auto roster = findRecord<Roster>(rosterKey(), deadline); roster.ok() && *roster && (*roster)->refusal)
      note += "; an attempt of other processes has failed: " + (*roster)->refusal->message();
    return note;
  }
  /// The longest pause between polls: many ranks poll less often.
  milliseconds pause() const { return milliseconds(50 + job.size / 10); }
};

/// "rank 3 has opened plan X, …", of another rank than the job's.
std::string otherPlan(const JobOptions &job, uint32_t rank, const std::string &plan) {
  if (plan == kNoPlan)
    return "rank " + std::to_string(rank) + " has failed before it joined";
  return "rank " + std::to_string(rank) + " has opened plan " + plan + ", rank " + std::to_string(job.rank) +
         " has opened plan " + job.plan + "; give the same plan file to all ranks";
}

} // namespace

Hello helloOfThisProcess() {
  Hello own;
  own.library = RESHARD_VERSION;
  own.token = randomNumber();
  own.host = hostName();
  own.process = static_cast<uint64_t>(::getpid());
  return own;
}

/// With "-" for a job without a name.
std::string jobPrefix(const std::string &name) {
  return "reshard/" + (name.empty() ? "-" : percentEncoded(name)) + "/";
}

Deadline shortly() { return Clock::now() + milliseconds(200); }

Status announcePlan(Store &store, const JobOptions &job, uint64_t token, const Deadline &deadline) {
  return JobStore{store, job}.announcePlan(job.plan, token, deadline);
}

std::string planNoteOf(Store &store, const JobOptions &job, uint32_t rank, const Deadline &deadline) {
  const JobStore at{store, job};
  const Result<std::optional<Unsealed>> found = at.find(at.anyKey("plan", rank), deadline);
  const std::optional<Opened> other = found.ok() && *found ? Opened::decode((*found)->record) : std::nullopt;
  return other && other->plan != job.plan ? " (" + otherPlan(job, rank, other->plan) + ")" : "";
}

void refuseJob(Store &store, const JobOptions &job, const Status &reason, const Deadline &deadline) {
  const JobStore at{store, job};
  const uint64_t own = randomNumber();
  uint32_t size = job.size;
  std::map<uint32_t, uint64_t> refused; // tokens of processes by rank
  Polling polling(milliseconds(50));
  do {
    uint32_t known = 1;
    for (uint32_t rank = 1; rank < (size == 0 ? kPolledRanks : size); ++rank) {
      const auto opened = at.findRecord<Opened>(at.anyKey("plan", rank), deadline);
      const auto differs = at.findRecord<Welcome>(at.anyKey("differs", rank), deadline);
      if (!opened.ok() || !differs.ok())
        return;
      if (!*opened)
        continue;
      if (job.size == 0)
        size = std::max(size, std::min((*opened)->size, kMaxRefused));
      const uint64_t token = (*opened)->token;
      const bool answered = *differs && **differs == Welcome{0, token};
      if (answered && refused[rank] != token)
        continue; // the rest of an earlier attempt
      if (answered)
        ++known;
      else if (!at.set(at.anyKey("refusal", rank), Roster{own, {token}, reason}, deadline).ok())
        return;
      refused[rank] = token;
    }
    if (known == size)
      return;
  } while (polling.wait(deadline));
}

Deadline launchDeadline(const Deadline &deadline) {
  Deadline until = deadlineIn(5, deadline.interrupt);
  if (deadline)
    until = std::min(*until, *deadline);
  until.interrupt = deadline.interrupt;
  return until;
}

void reportFailure(Store &store, const JobOptions &job, const Status &reason, const Deadline &deadline) {
  const JobStore at{store, job};
  const Deadline until = launchDeadline(deadline);
  const uint32_t rank = job.rank;
  const uint64_t own = randomNumber();
  const Status failure = Status(reason).withPrefix("rank " + std::to_string(rank) + ": ");
  if (!at.set(at.anyKey("failure", rank), Roster{0, {own}, failure}, until).ok() ||
      !at.announcePlan(kNoPlan, own, until).ok())
    return;
  auto inform = [&](uint64_t zero) { return at.set(at.anyKey("differs", rank), Welcome{zero, own}, until); };
  if (rank == 0)
    return refuseJob(store, job, failure, until);
  uint64_t zero = 0; // the token of the rank 0 that knows the failure
  Polling polling(milliseconds(50));
  do {
    const auto refusal = at.findRecord<Roster>(at.anyKey("refusal", rank), until);
    const auto opened = at.findRecord<Opened>(at.anyKey("plan", 0), until);
    if (!refusal.ok() || !opened.ok())
      return;
    if (*refusal && (*refusal)->tokens == std::vector{own})
      return (void)inform(0);
    if (!*opened || (*opened)->token == zero)
      continue;
    zero = (*opened)->token;
    if (!inform(zero).ok())
      return;
  } while (polling.wait(until));
}

namespace {

/// This process's hello in the store.
class OwnHello {
public:
  explicit OwnHello(const JobStore &at) : at_(at), key_(at.key("hello", at.job.rank)) {}
  const Hello &hello() const { return hello_; }
  uint64_t token() const { return hello_.token; }
  /// Sets this process's plan and hello, with the transport's content.
  Status announce(std::string_view content, const Deadline &deadline) {
    hello_.content = content;
    const Result<std::optional<Unsealed>> before = at_.find(key_, deadline);
    if (!before.ok())
      return before.status();
    if (*before)
      if (const std::optional<Hello> other = Hello::decode((*before)->record))
        hello_.previous = other->token;
    sealed_ = seal(at_.job.authenticator, key_, hello_.encode());
    if (Status status = at_.announcePlan(at_.job.plan, token(), deadline); !status.ok())
      return status;
    return at_.store.set(key_, sealed_, deadline);
  }
  /// Fails if another process has replaced the hello; sets it again if the store has lost it.
  Status keep(const Deadline &deadline) {
    const Result<std::optional<std::string>> value = at_.store.find(key_, deadline);
    if (!value.ok())
      return value.status();
    if (!*value)
      return at_.store.set(key_, sealed_, deadline);
    if (**value == sealed_)
      return {};
    const std::optional<Unsealed> unsealed = unseal(at_.job.authenticator, key_, **value);
    const std::optional<Hello> other = unsealed ? Hello::decode(unsealed->record) : std::nullopt;
    if (!other)
      return at_.store.set(key_, sealed_, deadline);
    const Conflict conflict{token(), other->token, sameRank(at_.job.rank, hello_.who(), other->who())};
    Status status = at_.set(at_.key("conflict", at_.job.rank), conflict, deadline);
    return status.ok() ? failed(conflict.text) : status;
  }

private:
  const JobStore &at_;
  const std::string key_;
  Hello hello_ = helloOfThisProcess();
  std::string sealed_; // hello_
};

/// Rank 0's part: reads what the other ranks say, and completes the job or refuses it.
class Admission {
public:
  Admission(const JobStore &at, OwnHello &own) : at_(at), own_(own), peers_(at.job.size) {}
  /// The roster of the complete job.
  Result<Roster> run(const Deadline &deadline) {
    const Deadline givesUp = earlier(deadline);
    const Clock::time_point begin = Clock::now();
    Polling polling(at_.pause());
    while (true) {
      if (Status status = own_.keep(deadline); !status.ok())
        return status; // the other rank 0 finds the conflict, and refuses
      bool complete = own_.hello().previous == 0 || Clock::now() - begin > 3 * at_.pause();
      Status refused = findConflict(0, deadline);
      for (uint32_t rank = 1; rank < size() && refused.ok(); ++rank) {
        const Result<bool> answered = poll(rank, deadline);
        refused = answered.status();
        complete = complete && answered.ok() && *answered;
      }
      if (!refused.ok())
        return refuse(std::move(refused), deadline);
      if (complete)
        break;
      if (!polling.wait(givesUp))
        return refuse(missing(), deadline);
    }
    Roster roster{session_, {own_.token()}, {}};
    for (uint32_t rank = 1; rank < size(); ++rank)
      roster.tokens.push_back(peers_[rank].token);
    Status status = at_.set(at_.rosterKey(), roster, deadline);
    return status.ok() ? Result<Roster>(std::move(roster)) : status;
  }

private:
  /// What rank 0 knows about another rank.
  struct Peer {
    uint64_t token = 0; // 0: it has said nothing
    Clock::time_point since;
    std::string who, problem; // a problem is decisive once it has answered
    bool trusted = false;     // it has this job's secret, so it can read a refusal
    bool replaced = false;    // its hello replaced another one
    bool answered = false;
    std::optional<Clock::time_point> differs; // since when it is known that it has another plan
    uint64_t refused = 0;  // the token that it has with another plan, to which the refusal was addressed
    bool informed = false; // it knows the refusal
  };

  uint32_t size() const { return at_.job.size; }
  /// Whether a rank has answered.
  Result<bool> poll(uint32_t rank, const Deadline &deadline) {
    if (Status status = readHello(rank, deadline); !status.ok())
      return status;
    if (!peers_[rank].answered) // its hello may be the rest of an earlier attempt
      if (Status status = findOtherPlan(rank, deadline); !status.ok())
        return status;
    if (peers_[rank].token == 0)
      return false;
    if (Status status = findConflict(rank, deadline); !status.ok())
      return status;
    return findAnswer(rank, deadline);
  }
  Status readHello(uint32_t rank, const Deadline &deadline) {
    const Result<std::optional<Unsealed>> found = at_.find(at_.key("hello", rank), deadline);
    if (!found.ok() || !*found)
      return found.status();
    const std::optional<Hello> hello = Hello::decode((*found)->record);
    Peer &peer = peers_[rank];
    if (!hello || hello->token == peer.token)
      return {};
    const bool trusted = (*found)->problem.empty();
    peer = {hello->token, Clock::now(), hello->who(), {}, trusted, hello->previous != 0, false, {}, 0, false};
    if (!(*found)->problem.empty())
      peer.problem = "the hello of rank " + std::to_string(rank) + " (" + peer.who + ") " + (*found)->problem +
                     "; give all processes the same secret (RESHARD_SECRET)";
    else if (hello->version != own_.hello().version || hello->library != own_.hello().library)
      peer.problem = "rank " + std::to_string(rank) + " (" + peer.who + ") runs reshard " + hello->library +
                     " with version " + std::to_string(hello->version) + " of the rendezvous, rank 0 runs reshard " +
                     own_.hello().library + " with version " + std::to_string(own_.hello().version) +
                     "; install the same release for all processes";
    return at_.set(at_.key("welcome", rank), Welcome{session_, peer.token}, deadline);
  }
  Status findOtherPlan(uint32_t rank, const Deadline &deadline) {
    const auto differs = at_.findRecord<Welcome>(at_.anyKey("differs", rank), deadline);
    if (!differs.ok() || !*differs || (*differs)->session != own_.token())
      return differs.status();
    Peer &peer = peers_[rank];
    if (!peer.differs)
      peer.differs = Clock::now();
    if (Clock::now() - std::max(*peer.differs, peer.since) < std::max(kOtherPlan, 3 * at_.pause()))
      return {};
    const auto opened = at_.findRecord<Opened>(at_.anyKey("plan", rank), deadline);
    if (!opened.ok() || !*opened || (*opened)->plan == at_.job.plan) // it has started again
      return opened.status();
    if ((*opened)->plan != kNoPlan)
      return failed(otherPlan(at_.job, rank, (*opened)->plan));
    const auto failure = at_.findRecord<Roster>(at_.anyKey("failure", rank), deadline);
    if (!failure.ok() || !*failure || (*failure)->tokens != std::vector{(*opened)->token} || !(*failure)->refusal)
      return failure.status();
    return *(*failure)->refusal;
  }
  Status findConflict(uint32_t rank, const Deadline &deadline) {
    const auto conflict = at_.findRecord<Conflict>(at_.key("conflict", rank), deadline);
    if (!conflict.ok() || !*conflict)
      return conflict.status();
    const uint64_t token = rank == 0 ? own_.token() : peers_[rank].token;
    return (*conflict)->first == token || (*conflict)->second == token ? failed((*conflict)->text) : Status();
  }
  Result<bool> findAnswer(uint32_t rank, const Deadline &deadline) {
    Peer &peer = peers_[rank];
    if (peer.answered)
      return true;
    const Result<std::optional<Unsealed>> found = at_.find(at_.key("answer", rank), deadline);
    if (!found.ok())
      return found.status();
    const std::optional<Welcome> answer = *found ? Welcome::decode((*found)->record) : std::nullopt;
    if (!answer || *answer != Welcome{session_, peer.token})
      return false;
    if (!peer.problem.empty())
      return failed(peer.problem);
    // A running process whose hello was replaced finds that within one pause.
    peer.answered = !peer.replaced || Clock::now() - peer.since > 3 * at_.pause();
    return peer.answered;
  }
  /// Tells all processes of the job why it fails, and waits until they know, also for those that start later, as long
  /// as processes of one launch take to start: the store may end with this process.
  Status refuse(Status reason, const Deadline &deadline) {
    Roster roster{session_, {own_.token()}, reason};
    for (uint32_t rank = 1; rank < size(); ++rank)
      roster.tokens.push_back(peers_[rank].token);
    const Deadline until = launchDeadline(deadline);
    if (!at_.set(at_.rosterKey(), roster, until).ok())
      return reason;
    Polling polling(at_.pause());
    do {
      bool known = true;
      for (uint32_t rank = 1; rank < peers_.size(); ++rank) {
        const Result<bool> informed = sendRefusal(rank, roster, until);
        if (!informed.ok())
          return reason;
        known = known && *informed;
      }
      if (known)
        break;
    } while (polling.wait(until));
    return reason;
  }
  /// Tells a rank why the job fails. Returns whether it knows, or cannot read it. The roster gets the tokens of ranks
  /// that have said hello since.
  Result<bool> sendRefusal(uint32_t rank, Roster &roster, const Deadline &deadline) {
    Peer &peer = peers_[rank];
    if (peer.informed)
      return true;
    if (rank < size())
      if (Status status = readHello(rank, deadline); !status.ok())
        return status;
    if (rank < size() && roster.tokens[rank] != peer.token) { // it has said hello since
      roster.tokens[rank] = peer.token;
      if (Status status = at_.set(at_.rosterKey(), roster, deadline); !status.ok())
        return status;
    }
    if (peer.token != 0 && peer.trusted) { // it reads the roster, unless its hello is the rest of an earlier attempt
      const auto answer = at_.findRecord<Welcome>(at_.key("answer", rank), deadline);
      if (!answer.ok())
        return answer.status();
      peer.informed = *answer == Welcome{0, peer.token};
      if (peer.informed || peer.answered)
        return peer.informed;
    }
    const auto differs = at_.findRecord<Welcome>(at_.anyKey("differs", rank), deadline);
    if (!differs.ok())
      return differs.status();
    peer.informed = peer.refused != 0 && *differs == Welcome{0, peer.refused};
    if (!*differs || (*differs)->session != own_.token())
      return peer.informed || (peer.token != 0 && !peer.trusted);
    peer.refused = (*differs)->token;
    const Roster refusal{roster.session, {peer.refused}, roster.refusal};
    const auto opened = at_.findRecord<Opened>(at_.anyKey("plan", rank), deadline);
    if (opened.ok() && *opened && (*opened)->size > peers_.size())
      peers_.resize(std::min((*opened)->size, kMaxRefused)); // more ranks of the other plan
    Status status = at_.set(at_.anyKey("refusal", rank), refusal, deadline);
    return status.ok() ? Result<bool>(false) : status;
  }
  /// The error at the deadline of rank 0: the ranks that have not joined.
  Status missing() {
    constexpr uint32_t kShown = 8;
    const Deadline soon = shortly();
    std::string text;
    uint32_t count = 0;
    for (uint32_t rank = 1; rank < size(); ++rank) {
      const Peer &peer = peers_[rank];
      if (peer.answered || ++count > kShown)
        continue;
      text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank);
      if (peer.token == 0)
        text += " has not joined" + planNoteOf(at_.store, at_.job, rank, soon);
      else
        text += " (" + peer.who + ") has said hello, but does not answer" +
                (peer.problem.empty() ? "" : ": " + peer.problem);
    }
    if (count > kShown)
      text += "; and " + std::to_string(count - kShown) + " more";
    if (count == 0)
      text = "another process may have joined as rank 0";
    return timedOut("timed out: " + text + at_.note(soon));
  }

  const JobStore &at_;
  OwnHello &own_;
  const uint64_t session_ = randomNumber();
  std::vector<Peer> peers_; // by rank; in a refusal also ranks of another plan
};

/// The part of each other rank: answers rank 0, and waits for the roster.
class JoiningRank {
public:
  JoiningRank(const JobStore &at, OwnHello &own) : at_(at), own_(own), rank_(at.job.rank) {}
  /// The roster of the complete job.
  Result<Roster> run(const Deadline &deadline) {
    Polling polling(at_.pause());
    while (true) {
      const Result<std::optional<Roster>> roster = poll(deadline);
      if (!roster.ok())
        return Status(roster.status()).withSuffix(note_);
      if (*roster)
        return **roster;
      if (!polling.wait(deadline))
        return timedOut("timed out: rank 0 has not " + (answered_.session ? "completed the roster" : "joined" + note_) +
                        at_.note(shortly()));
    }
  }

private:
  /// The roster, once the job is complete.
  Result<std::optional<Roster>> poll(const Deadline &deadline) {
    if (Status status = own_.keep(deadline); !status.ok())
      return status;
    if (Status status = findRefusal(deadline); !status.ok())
      return status;
    if (Status status = findWelcome(deadline); !status.ok())
      return status;
    if (!answered_.session)
      if (Status status = compareWithRankZero(deadline); !status.ok())
        return status;
    return findRoster(deadline);
  }
  Status findWelcome(const Deadline &deadline) {
    const Result<std::optional<Unsealed>> found = at_.find(at_.key("welcome", rank_), deadline);
    if (!found.ok() || !*found)
      return found.status();
    const std::optional<Welcome> welcome = Welcome::decode((*found)->record);
    if (!welcome || welcome->token != own_.token() || *welcome == answered_)
      return {};
    if (Status status = at_.set(at_.key("answer", rank_), *welcome, deadline); !status.ok())
      return status;
    answered_ = *welcome;
    note_.clear();
    if (!(*found)->problem.empty())
      return failed("the welcome of rank 0 " + (*found)->problem +
                    "; give all processes the same secret (RESHARD_SECRET)");
    return {};
  }
  Result<std::optional<Roster>> findRoster(const Deadline &deadline) {
    Result<std::optional<Roster>> found = at_.findRecord<Roster>(at_.rosterKey(), deadline);
    if (!found.ok() || !*found)
      return found;
    const Roster &roster = **found;
    if (roster.tokens.size() != at_.job.size || roster.tokens[rank_] != own_.token())
      return std::optional<Roster>();
    if (!roster.refusal)
      return found;
    // Only tells rank 0 that it need not wait: an error here changes nothing.
    [[maybe_unused]] const Status sent =
        at_.set(at_.key("answer", rank_), Welcome{0, own_.token()}, deadline ? deadline : shortly());
    return *roster.refusal;
  }
  Status findRefusal(const Deadline &deadline) {
    const auto refusal = at_.findRecord<Roster>(at_.anyKey("refusal", rank_), deadline);
    if (!refusal.ok() || !*refusal || (*refusal)->tokens != std::vector{own_.token()} || !(*refusal)->refusal)
      return refusal.status();
    note_.clear();
    // Only tells rank 0 that it need not wait: an error here changes nothing.
    [[maybe_unused]] const Status sent =
        at_.set(at_.anyKey("differs", rank_), Welcome{0, own_.token()}, deadline ? deadline : shortly());
    return *(*refusal)->refusal;
  }
  /// Tells rank 0 that this process has another plan, if it has, and notes it.
  Status compareWithRankZero(const Deadline &deadline) {
    const auto opened = at_.findRecord<Opened>(at_.anyKey("plan", 0), deadline);
    if (!opened.ok())
      return opened.status();
    const bool other = *opened && (*opened)->plan != at_.job.plan;
    note_ = other ? " (" + otherPlan(at_.job, 0, (*opened)->plan) + ")" : "";
    if (!other || (*opened)->token == differs_)
      return {};
    differs_ = (*opened)->token;
    return at_.set(at_.anyKey("differs", rank_), Welcome{differs_, own_.token()}, deadline);
  }

  const JobStore &at_;
  OwnHello &own_;
  const uint32_t rank_;
  Welcome answered_;     // the last welcome that this rank answered
  uint64_t differs_ = 0; // the token of the rank 0 that knows that its plan differs from this rank's
  std::string note_;     // a text about the plan of rank 0, kept since the store may end before this process's deadline
};

} // namespace

Status StoreRendezvous::join(std::string_view hello, const Deadline &deadline) {
  begun_ = true;
  if (options_.rank >= options_.size)
    return invalid("found rank " + std::to_string(options_.rank) + ", expected less than " +
                   std::to_string(options_.size) + ", the number of processes");
  const JobStore at{store_, options_};
  OwnHello own(at);
  if (Status status = own.announce(hello, deadline); !status.ok())
    return status;
  Result<Roster> roster = options_.rank == 0 ? Admission(at, own).run(deadline) : JoiningRank(at, own).run(deadline);
  if (roster.ok())
    roster_ = std::move(*roster);
  return roster.status();
}

Result<std::string> StoreRendezvous::hello(uint32_t rank, const Deadline &deadline) {
  const JobStore at{store_, options_};
  if (rank >= roster_.tokens.size())
    return invalid("rank " + std::to_string(rank) + " has not joined");
  const Result<std::optional<Unsealed>> found = at.find(at.key("hello", rank), deadline);
  if (!found.ok())
    return found.status();
  const std::optional<Hello> hello = *found ? Hello::decode((*found)->record) : std::nullopt;
  if (!hello || !(*found)->problem.empty() || hello->token != roster_.tokens[rank])
    return failed("the hello of rank " + std::to_string(rank) +
                  (!*found  ? " is no longer in the store"
                   : !hello ? " is damaged"
                   : !(*found)->problem.empty()
                       ? " " + (*found)->problem
                       : " is that of another process (" + hello->who() + "), which joined later"));
  return hello->content;
}

} // namespace reshard
