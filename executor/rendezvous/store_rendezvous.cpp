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

/// A key of a job with any plan.
std::string keyOf(const JobOptions &job, const char *kind, uint32_t rank) {
  return jobPrefix(job.name) + kind + "/" + std::to_string(rank);
}

Status setSealed(Store &store, const JobOptions &job, const std::string &key, const std::string &record,
                 const Deadline &deadline) {
  return store.set(key, seal(job.authenticator, key, record), deadline);
}

Result<std::optional<Unsealed>> findSealed(Store &store, const JobOptions &job, const std::string &key,
                                           const Deadline &deadline) {
  const Result<std::optional<std::string>> value = store.find(key, deadline);
  if (!value.ok())
    return value.status();
  return *value ? unseal(job.authenticator, key, **value) : std::nullopt;
}

/// A record that a process with the job's secret has made, or none.
template <class Record>
Result<std::optional<Record>> findRecord(Store &store, const JobOptions &job, const std::string &key,
                                         const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = findSealed(store, job, key, deadline);
  if (!found.ok())
    return found.status();
  return *found && (*found)->problem.empty() ? Record::decode((*found)->record) : std::nullopt;
}

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
  return setSealed(store, job, keyOf(job, "plan", job.rank), Opened{job.plan, token, job.size}.encode(), deadline);
}

std::string planNoteOf(Store &store, const JobOptions &job, uint32_t rank, const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = findSealed(store, job, keyOf(job, "plan", rank), deadline);
  const std::optional<Opened> other = found.ok() && *found ? Opened::decode((*found)->record) : std::nullopt;
  return other && other->plan != job.plan ? " (" + otherPlan(job, rank, other->plan) + ")" : "";
}

void refuseJob(Store &store, const JobOptions &job, const Status &reason, const Deadline &deadline) {
  const uint64_t own = randomNumber();
  uint32_t size = job.size;
  std::map<uint32_t, uint64_t> refused; // tokens of processes by rank
  Polling polling(milliseconds(50));
  do {
    uint32_t known = 1;
    for (uint32_t rank = 1; rank < (size == 0 ? kPolledRanks : size); ++rank) {
      const auto opened = findRecord<Opened>(store, job, keyOf(job, "plan", rank), deadline);
      const auto differs = findRecord<Welcome>(store, job, keyOf(job, "differs", rank), deadline);
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
      else if (!setSealed(store, job, keyOf(job, "refusal", rank), Roster{own, {token}, reason}.encode(), deadline)
                    .ok())
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
  const Deadline until = launchDeadline(deadline);
  const uint32_t rank = job.rank;
  const uint64_t own = randomNumber();
  const Status failure = Status(reason).withPrefix("rank " + std::to_string(rank) + ": ");
  auto write = [&](const char *kind, const std::string &record) {
    return setSealed(store, job, keyOf(job, kind, rank), record, until).ok();
  };
  if (!write("failure", Roster{0, {own}, failure}.encode()) || !write("plan", Opened{kNoPlan, own, job.size}.encode()))
    return;
  if (rank == 0)
    return refuseJob(store, job, failure, until);
  uint64_t zero = 0; // the token of the rank 0 that knows the failure
  Polling polling(milliseconds(50));
  do {
    const auto refusal = findRecord<Roster>(store, job, keyOf(job, "refusal", rank), until);
    const auto opened = findRecord<Opened>(store, job, keyOf(job, "plan", 0), until);
    if (!refusal.ok() || !opened.ok())
      return;
    if (*refusal && (*refusal)->tokens == std::vector{own}) {
      write("differs", Welcome{0, own}.encode());
      return;
    }
    if (!*opened || (*opened)->token == zero)
      continue;
    zero = (*opened)->token;
    if (!write("differs", Welcome{zero, own}.encode()))
      return;
  } while (polling.wait(until));
}

StoreRendezvous::StoreRendezvous(Store &store, JobOptions options)
    : store_(store), options_(std::move(options)), prefix_(jobPrefix(options_.name) + options_.plan + "/"),
      own_(helloOfThisProcess()), peers_(options_.size) {}

std::string StoreRendezvous::key(const char *kind, uint32_t rank) const {
  return prefix_ + kind + "/" + std::to_string(rank);
}

Status StoreRendezvous::set(const std::string &key, const std::string &record, const Deadline &deadline) {
  return setSealed(store_, options_, key, record, deadline);
}

Result<std::optional<Unsealed>> StoreRendezvous::find(const std::string &key, const Deadline &deadline) {
  return findSealed(store_, options_, key, deadline);
}

Status StoreRendezvous::join(std::string_view hello, const Deadline &deadline) {
  begun_ = true;
  if (options_.rank >= options_.size)
    return invalid("found rank " + std::to_string(options_.rank) + ", expected less than " +
                   std::to_string(options_.size) + ", the number of processes");
  if (Status status = announce(hello, deadline); !status.ok())
    return status;
  return options_.rank == 0 ? admit(deadline) : enter(deadline);
}

Status StoreRendezvous::announce(std::string_view hello, const Deadline &deadline) {
  own_.content = hello;
  const std::string at = key("hello", options_.rank);
  const Result<std::optional<Unsealed>> before = find(at, deadline);
  if (!before.ok())
    return before.status();
  if (*before)
    if (const std::optional<Hello> other = Hello::decode((*before)->record))
      own_.previous = other->token;
  ownRecord_ = seal(options_.authenticator, at, own_.encode());
  if (Status status = announcePlan(store_, options_, own_.token, deadline); !status.ok())
    return status;
  return store_.set(at, ownRecord_, deadline);
}

Status StoreRendezvous::keepHello(const Deadline &deadline) {
  const std::string at = key("hello", options_.rank);
  const Result<std::optional<std::string>> value = store_.find(at, deadline);
  if (!value.ok())
    return value.status();
  if (!*value)
    return store_.set(at, ownRecord_, deadline);
  if (**value == ownRecord_)
    return {};
  const std::optional<Unsealed> unsealed = unseal(options_.authenticator, at, **value);
  const std::optional<Hello> other = unsealed ? Hello::decode(unsealed->record) : std::nullopt;
  if (!other)
    return store_.set(at, ownRecord_, deadline);
  const Conflict conflict{own_.token, other->token, sameRank(options_.rank, own_.who(), other->who())};
  Status status = set(key("conflict", options_.rank), conflict.encode(), deadline);
  return status.ok() ? failed(conflict.text) : status;
}

// Rank 0.

Status StoreRendezvous::admit(const Deadline &deadline) {
  session_ = randomNumber();
  const Deadline givesUp = earlier(deadline);
  const Clock::time_point begin = Clock::now();
  Polling polling(pause());
  while (true) {
    if (Status status = keepHello(deadline); !status.ok())
      return status; // the other rank 0 finds the conflict, and refuses
    bool complete = own_.previous == 0 || Clock::now() - begin > 3 * pause();
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
  Roster roster{session_, {own_.token}, {}};
  for (uint32_t rank = 1; rank < size(); ++rank)
    roster.tokens.push_back(peers_[rank].token);
  tokens_ = roster.tokens;
  return set(prefix_ + "roster", roster.encode(), deadline);
}

/// Whether a rank has answered.
Result<bool> StoreRendezvous::poll(uint32_t rank, const Deadline &deadline) {
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

Status StoreRendezvous::readHello(uint32_t rank, const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = find(key("hello", rank), deadline);
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
  else if (hello->version != own_.version || hello->library != own_.library)
    peer.problem = "rank " + std::to_string(rank) + " (" + peer.who + ") runs reshard " + hello->library +
                   " with version " + std::to_string(hello->version) + " of the rendezvous, rank 0 runs reshard " +
                   own_.library + " with version " + std::to_string(own_.version) +
                   "; install the same release for all processes";
  return set(key("welcome", rank), Welcome{session_, peer.token}.encode(), deadline);
}

Status StoreRendezvous::findOtherPlan(uint32_t rank, const Deadline &deadline) {
  const auto differs = findRecord<Welcome>(store_, options_, keyOf(options_, "differs", rank), deadline);
  if (!differs.ok() || !*differs || (*differs)->session != own_.token)
    return differs.status();
  Peer &peer = peers_[rank];
  if (!peer.differs)
    peer.differs = Clock::now();
  if (Clock::now() - std::max(*peer.differs, peer.since) < std::max(kOtherPlan, 3 * pause()))
    return {};
  const auto opened = findRecord<Opened>(store_, options_, keyOf(options_, "plan", rank), deadline);
  if (!opened.ok() || !*opened || (*opened)->plan == options_.plan) // it has started again
    return opened.status();
  if ((*opened)->plan != kNoPlan)
    return failed(otherPlan(options_, rank, (*opened)->plan));
  const auto failure = findRecord<Roster>(store_, options_, keyOf(options_, "failure", rank), deadline);
  if (!failure.ok() || !*failure || (*failure)->tokens != std::vector{(*opened)->token} || !(*failure)->refusal)
    return failure.status();
  return *(*failure)->refusal;
}

Status StoreRendezvous::findConflict(uint32_t rank, const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = find(key("conflict", rank), deadline);
  if (!found.ok() || !*found || !(*found)->problem.empty())
    return found.status();
  const std::optional<Conflict> conflict = Conflict::decode((*found)->record);
  const uint64_t token = rank == 0 ? own_.token : peers_[rank].token;
  const bool current = conflict && (conflict->first == token || conflict->second == token);
  return current ? failed(conflict->text) : Status();
}

Result<bool> StoreRendezvous::findAnswer(uint32_t rank, const Deadline &deadline) {
  Peer &peer = peers_[rank];
  if (peer.answered)
    return true;
  const Result<std::optional<Unsealed>> found = find(key("answer", rank), deadline);
  if (!found.ok())
    return found.status();
  const std::optional<Welcome> answer = *found ? Welcome::decode((*found)->record) : std::nullopt;
  if (!answer || *answer != Welcome{session_, peer.token})
    return false;
  if (!peer.problem.empty())
    return failed(peer.problem);
  // A running process whose hello was replaced finds that within one pause.
  peer.answered = !peer.replaced || Clock::now() - peer.since > 3 * pause();
  return peer.answered;
}

/// Tells all processes of the job why it fails, and waits until they know, also for those that start later, as long as
/// processes of one launch take to start: the store may end with this process.
Status StoreRendezvous::refuse(Status reason, const Deadline &deadline) {
  Roster roster{session_, {own_.token}, reason};
  for (uint32_t rank = 1; rank < size(); ++rank)
    roster.tokens.push_back(peers_[rank].token);
  const Deadline until = launchDeadline(deadline);
  if (!set(prefix_ + "roster", roster.encode(), until).ok())
    return reason;
  Polling polling(pause());
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

Result<bool> StoreRendezvous::sendRefusal(uint32_t rank, Roster &roster, const Deadline &deadline) {
  Peer &peer = peers_[rank];
  if (peer.informed)
    return true;
  if (rank < size())
    if (Status status = readHello(rank, deadline); !status.ok())
      return status;
  if (rank < size() && roster.tokens[rank] != peer.token) { // it has said hello since
    roster.tokens[rank] = peer.token;
    if (Status status = set(prefix_ + "roster", roster.encode(), deadline); !status.ok())
      return status;
  }
  if (peer.token != 0 && peer.trusted) { // it reads the roster, unless its hello is the rest of an earlier attempt
    const auto answer = findRecord<Welcome>(store_, options_, key("answer", rank), deadline);
    if (!answer.ok())
      return answer.status();
    peer.informed = *answer == Welcome{0, peer.token};
    if (peer.informed || peer.answered)
      return peer.informed;
  }
  const auto differs = findRecord<Welcome>(store_, options_, keyOf(options_, "differs", rank), deadline);
  if (!differs.ok())
    return differs.status();
  peer.informed = peer.refused != 0 && *differs == Welcome{0, peer.refused};
  if (!*differs || (*differs)->session != own_.token)
    return peer.informed || (peer.token != 0 && !peer.trusted);
  peer.refused = (*differs)->token;
  const Roster refusal{roster.session, {peer.refused}, roster.refusal};
  const auto opened = findRecord<Opened>(store_, options_, keyOf(options_, "plan", rank), deadline);
  if (opened.ok() && *opened && (*opened)->size > peers_.size())
    peers_.resize(std::min((*opened)->size, kMaxRefused)); // more ranks of the other plan
  Status status = setSealed(store_, options_, keyOf(options_, "refusal", rank), refusal.encode(), deadline);
  return status.ok() ? Result<bool>(false) : status;
}

/// The error at the deadline of rank 0: the ranks that have not joined.
Status StoreRendezvous::missing() {
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
      text += " has not joined" + planNoteOf(store_, options_, rank, soon);
    else
      text +=
          " (" + peer.who + ") has said hello, but does not answer" + (peer.problem.empty() ? "" : ": " + peer.problem);
  }
  if (count > kShown)
    text += "; and " + std::to_string(count - kShown) + " more";
  if (count == 0)
    text = "another process may have joined as rank 0";
  return timedOut("timed out: " + text + storeNote(soon));
}

// Other ranks.

Status StoreRendezvous::enter(const Deadline &deadline) {
  Polling polling(pause());
  while (true) {
    Result<bool> complete = pollRankZero(deadline);
    if (!complete.ok())
      return Status(complete.status()).withSuffix(note_);
    if (*complete)
      return {};
    if (!polling.wait(deadline))
      return timedOut("timed out: rank 0 has not " + (answered_.session ? "completed the roster" : "joined" + note_) +
                      storeNote(shortly()));
  }
}

/// Whether the job is complete.
Result<bool> StoreRendezvous::pollRankZero(const Deadline &deadline) {
  if (Status status = keepHello(deadline); !status.ok())
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

Status StoreRendezvous::findRefusal(const Deadline &deadline) {
  const auto refusal = findRecord<Roster>(store_, options_, keyOf(options_, "refusal", rank()), deadline);
  if (!refusal.ok() || !*refusal || (*refusal)->tokens != std::vector{own_.token} || !(*refusal)->refusal)
    return refusal.status();
  note_.clear();
  // Only tells rank 0 that it need not wait: an error here changes nothing.
  [[maybe_unused]] const Status sent = setSealed(store_, options_, keyOf(options_, "differs", rank()),
                                                 Welcome{0, own_.token}.encode(), deadline ? deadline : shortly());
  return *(*refusal)->refusal;
}

Status StoreRendezvous::compareWithRankZero(const Deadline &deadline) {
  const auto opened = findRecord<Opened>(store_, options_, keyOf(options_, "plan", 0), deadline);
  if (!opened.ok())
    return opened.status();
  const bool other = *opened && (*opened)->plan != options_.plan;
  note_ = other ? " (" + otherPlan(options_, 0, (*opened)->plan) + ")" : "";
  if (!other || (*opened)->token == differs_)
    return {};
  differs_ = (*opened)->token;
  return setSealed(store_, options_, keyOf(options_, "differs", rank()), Welcome{differs_, own_.token}.encode(),
                   deadline);
}

Status StoreRendezvous::findWelcome(const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = find(key("welcome", rank()), deadline);
  if (!found.ok() || !*found)
    return found.status();
  const std::optional<Welcome> welcome = Welcome::decode((*found)->record);
  if (!welcome || welcome->token != own_.token || *welcome == answered_)
    return {};
  if (Status status = set(key("answer", rank()), welcome->encode(), deadline); !status.ok())
    return status;
  answered_ = *welcome;
  note_.clear();
  if (!(*found)->problem.empty())
    return failed("the welcome of rank 0 " + (*found)->problem +
                  "; give all processes the same secret (RESHARD_SECRET)");
  return {};
}

Result<bool> StoreRendezvous::findRoster(const Deadline &deadline) {
  const Result<std::optional<Unsealed>> found = find(prefix_ + "roster", deadline);
  if (!found.ok())
    return found.status();
  if (!*found || !(*found)->problem.empty())
    return false;
  const std::optional<Roster> roster = Roster::decode((*found)->record);
  if (!roster || roster->tokens.size() != size() || roster->tokens[rank()] != own_.token)
    return false;
  if (roster->refusal) {
    // Only tells rank 0 that it need not wait: an error here changes nothing.
    [[maybe_unused]] const Status sent =
        set(key("answer", rank()), Welcome{0, own_.token}.encode(), deadline ? deadline : shortly());
    return *roster->refusal;
  }
  session_ = roster->session;
  tokens_ = roster->tokens;
  return true;
}

std::string StoreRendezvous::storeNote(const Deadline &deadline) {
  std::string note;
  if (const Result<std::optional<std::string>> found = store_.find(kRefusalsKey, deadline); found.ok() && *found)
    note = "; " + **found;
  const Result<std::optional<Unsealed>> found = find(prefix_ + "roster", deadline);
  const bool trusted = found.ok() && *found && (*found)->problem.empty();
  if (const std::optional<Roster> roster = trusted ? Roster::decode((*found)->record) : std::nullopt;
      roster && roster->refusal)
    note += "; an attempt of other processes has failed: " + roster->refusal->message();
  return note;
}

Result<std::string> StoreRendezvous::hello(uint32_t rank, const Deadline &deadline) {
  if (rank >= tokens_.size())
    return invalid("rank " + std::to_string(rank) + " has not joined");
  const Result<std::optional<Unsealed>> found = find(key("hello", rank), deadline);
  if (!found.ok())
    return found.status();
  const std::optional<Hello> hello = *found ? Hello::decode((*found)->record) : std::nullopt;
  if (!hello || !(*found)->problem.empty() || hello->token != tokens_[rank])
    return failed("the hello of rank " + std::to_string(rank) +
                  (!*found  ? " is no longer in the store"
                   : !hello ? " is damaged"
                   : !(*found)->problem.empty()
                       ? " " + (*found)->problem
                       : " is that of another process (" + hello->who() + "), which joined later"));
  return hello->content;
}

} // namespace reshard
