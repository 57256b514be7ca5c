// SPDX-License-Identifier: Apache-2.0
// The phases of a pull: begin() obtains an assignment, transfer() fetches, unpacks and confirms the messages,
// complete() waits for the other ranks of the replica. attempts() repeats them until one succeeds.
#include "executor/pull/puller.h"

#include "base/random.h"

#include <algorithm>
#include <utility>

namespace reshard::pull {

namespace {

using std::chrono::milliseconds;

/// The most ranges in flight from all servers; the number of messages, from the first that is not completely requested,
/// whose ranges are fetched.
constexpr size_t kInFlight = 16, kAhead = 256;
/// A child leaves a parent that has sent no frame for this time although the child waits for an answer.
constexpr milliseconds kUnresponsive{1000};
/// If this process itself did not run for this time, it could not receive frames, so it counts no other as
/// unresponsive.
constexpr milliseconds kPaused{200};
/// The longest lookup in the store; during a transfer, which it delays, it is shorter than kPaused.
constexpr milliseconds kLongLookup{2000}, kShortLookup{100};
/// The first pause after a refused attempt, and the longest.
constexpr milliseconds kFirstPause{2}, kMaxPause{100};
/// The pause before this process asks again when the coordinator serves another process of its rank.
constexpr milliseconds kReplaced{100};

uint64_t millisecondsUntil(const Deadline &deadline) {
  if (!deadline)
    return 1'000'000'000;
  const auto left = std::chrono::duration_cast<milliseconds>(*deadline - std::chrono::steady_clock::now()).count();
  return static_cast<uint64_t>(std::max<int64_t>(left, 0));
}

} // namespace

Puller::Puller(std::unique_ptr<Messenger> messenger, PullerOptions options)
    : messenger_(std::move(messenger)), options_(std::move(options)) {}

Puller::~Puller() = default;

Result<uint64_t> Puller::pull(const PullRequest &request) {
  const std::lock_guard lock(mutex_);
  request_ = &request;
  deadline_ = request.deadline;
  error_ = {};
  polled_ = Clock::now();
  options_.server->setPulling(true);
  struct Call { // also ends if an exception is thrown: nothing may write the caller's memory afterwards
    Puller &puller;
    ~Call() {
      try {
        puller.endCall();
      } catch (const std::bad_alloc &) { // servers without a `leave` end the leases at their deadline
      }
    }
  } const call{*this};
  return attempts();
}

void Puller::endCall() {
  endTransfers();
  request_ = nullptr;
  sourceDigests_.clear();
  call_ = 0;
  options_.server->setPulling(false);
  leaveServers();
}

Result<uint64_t> Puller::attempts() {
  call_ = std::max<uint64_t>(randomNumber(), 1);
  held_ = 0;
  sums_.reset();
  compared_ = false;
  replacements_ = 0;
  replaced_ = false;
  milliseconds pause = kFirstPause;
  for (uint64_t failed = 0;;) {
    if (Status status = begin(failed); !status.ok())
      return status;
    assignment_ = *assigned_;
    if (assignment_.version != version_) {
      if (Status status = startVersion(assignment_.version); !status.ok())
        return status;
      pause = kFirstPause;
    }
    failed = 0;
    Outcome outcome = request_->check && !sums_ ? collectDigests() : Outcome::done;
    if (outcome == Outcome::done)
      outcome = transfer();
    if (outcome == Outcome::again) {
      endTransfers();
      leaveServers();
      std::this_thread::sleep_for(pause); // the coordinator may not know yet what has changed
      pause = std::min(2 * pause, kMaxPause);
      failed = assignment_.number;
      continue;
    }
    if (outcome == Outcome::done) {
      leaveServers();
      if (request_->check && !compared_)
        outcome = compare();
      if (outcome == Outcome::done)
        outcome = complete();
    }
    if (outcome == Outcome::failed)
      return error_;
    if (outcome == Outcome::again)
      continue;
    if (!whole_)
      if (Status status = request_->afterWriting(); !status.ok())
        return status;
    whole_ = true;
    held_ = assignment_.number;
    heldBy_ = connectionTo(options_.fleet.sources()[0]).token;
    return version_.number;
  }
}

/// Waits for an assignment.
Status Puller::begin(uint64_t failed) {
  assigned_.reset();
  reason_.clear();
  Connection &coordinator = connectionTo(options_.fleet.sources()[0]);
  Clock::time_point again{}; // do not ask before
  for (bool asked = false; !assigned_;) {
    const bool any = handleEvents();
    if (!error_.ok())
      return error_;
    if (std::exchange(replaced_, false)) {
      assigned_.reset(); // the coordinator has forgotten it
      asked = false;
      again = Clock::now() + kReplaced;
    }
    if (assigned_)
      break;
    if (passed(deadline_))
      return timedOut("timed out: " + (coordinator.ready && !reason_.empty() ? reason_ : problemOf(coordinator)));
    if (!ready(coordinator, kLongLookup)) {
      asked = false;
    } else if (!asked && Clock::now() >= again) {
      send(coordinator,
           makeFrame(FrameKind::begin, {request_->minVersion, call_, failed, millisecondsUntil(deadline_)}));
      asked = true;
    }
    wait(any);
  }
  return {};
}

Status Puller::startVersion(const Version &version) {
  endTransfers();
  const std::vector<ReceivedMessage> &received = options_.table->received();
  version_ = version;
  written_ = whole_ = compared_ = false;
  sums_.reset();
  messages_.clear();
  messages_.resize(received.size());
  open_ = static_cast<size_t>(
      std::count_if(received.begin(), received.end(), [](const auto &each) { return each.packing.bytes() > 0; }));
  first_ = copies_ = 0;
  Status status = options_.server->serve(version);
  if (!status.ok())
    version_ = {}; // the next pull tries again
  return status;
}

Puller::Outcome Puller::transfer() {
  failed_ = false;
  polled_ = Clock::now();
  for (auto &[rank, connection] : connections_)
    connection.lastSeen = polled_;
  while (!finished()) {
    bool any = handleEvents();
    any = unpack() || any;
    any = runLocalSteps() || any;
    if (!error_.ok())
      return Outcome::failed;
    if (failed_)
      return Outcome::again;
    confirmReads();
    fetchMore();
    checkParent();
    if (passed(deadline_)) {
      error_ = timedOut("timed out: " + waitsFor());
      return Outcome::failed;
    }
    wait(any);
  }
  return Outcome::done;
}

/// Waits until all ranks of the replica have completed the assignment.
Puller::Outcome Puller::complete() {
  committed_.reset();
  repeated_.reset();
  Connection &coordinator = connectionTo(options_.fleet.sources()[0]);
  for (bool asked = false;;) {
    const bool any = handleEvents();
    if (committed_ == assignment_.number)
      return Outcome::done;
    if (!error_.ok())
      return Outcome::failed;
    // A coordinator that was lost is asked by begin(), since it may be a new process.
    if (repeated_ == assignment_.number || replaced_ || !coordinator.ready)
      return Outcome::again;
    if (!asked)
      send(coordinator, makeFrame(FrameKind::complete, {assignment_.number}));
    asked = true;
    if (passed(deadline_)) {
      error_ = timedOut("timed out: this rank has version " + std::to_string(version_.number) +
                        ", but other ranks of replica " + std::to_string(options_.fleet.replicaOf(options_.worldRank)) +
                        " have not completed it");
      return Outcome::failed;
    }
    wait(any);
  }
}

void Puller::wait(bool any) {
  const Clock::time_point now = Clock::now();
  if (now - polled_ > kPaused)
    for (auto &[rank, connection] : connections_)
      connection.lastSeen = now;
  polled_ = now;
  ping(connectionTo(options_.fleet.sources()[0]));
  if (any)
    sleep_.reset();
  else
    sleep_.wait();
}

/// Ends all transfers in flight: nothing writes the memory afterwards.
void Puller::endTransfers() {
  for (auto &[rank, connection] : connections_)
    if (connection.fetches > 0)
      disconnect(connection);
}

void Puller::leaveServers() {
  for (auto &[rank, connection] : connections_) {
    if (!connection.leased)
      continue;
    if (connection.ready)
      send(connection, makeFrame(FrameKind::leave, {version_.number}));
    discard(connection);
  }
}

// ---------------------------------------------------------------------------------------------------- the transfer

bool Puller::finished() const { return open_ == 0 && options_.progress->locals() == options_.table->locals().size(); }

/// The world rank that serves a message.
uint32_t Puller::serverOf(size_t number) const {
  const Fleet &fleet = options_.fleet;
  const uint32_t sender = options_.table->received()[number].sender;
  if (fleet.isTarget(sender))
    return fleet.worldRank(fleet.replicaOf(options_.worldRank), fleet.meshRankOf(sender));
  if (assignment_.parent != kSources && !messages_[number].askSender)
    return fleet.worldRank(assignment_.parent, fleet.meshRankOf(options_.worldRank));
  return sender;
}

void Puller::fetchMore() {
  const std::vector<ReceivedMessage> &received = options_.table->received();
  while (first_ < messages_.size() && messages_[first_].next == received[first_].packing.bytes())
    ++first_;
  for (size_t m = first_; m < std::min(messages_.size(), first_ + kAhead) && inFlight_ < kInFlight; ++m)
    while (inFlight_ < kInFlight && fetchOne(m)) {
    }
}

/// Asks for the next range of a message. Returns whether it could.
bool Puller::fetchOne(size_t number) {
  Message &message = messages_[number];
  const ReceivedMessage &received = options_.table->received()[number];
  if (message.next == received.packing.bytes() || options_.progress->locals() < received.localsBefore)
    return false;
  Connection &server = connectionTo(serverOf(number));
  if ((message.server && message.server != &server) || server.fetches == kWindow || !ready(server, kShortLookup))
    return false;
  Slot &slot = *std::find_if(server.slots.begin(), server.slots.end(),
                             [](const Slot &each) { return each.state == Slot::free; });
  slot.message = number;
  slot.begin = message.next;
  slot.end = std::min(received.packing.bytes(), message.next + options_.rangeBytes);
  slot.direct = received.packing.contiguous() != nullptr;
  if (!slot.direct && !slot.memory)
    slot.memory.reset(new std::byte[options_.rangeBytes]);
  slot.state = Slot::asked;
  ++inFlight_;
  if (server.fetches++ == 0)
    server.lastSeen = Clock::now();
  server.leased = true;
  message.server = &server;
  message.next = slot.end;
  message.inFlight.push_back(&slot);
  receiving_.insert(number);
  send(server, makeFrame(FrameKind::fetch, {version_.number, received.message, slot.begin, slot.end,
                                            static_cast<uint64_t>(&slot - server.slots.data()),
                                            messenger_->readsMemory(*server.peer), version_.incarnation}));
  return server.ready;
}

bool Puller::mayWrite() {
  if (written_ || !error_.ok())
    return error_.ok();
  error_ = request_->beforeWriting();
  written_ = error_.ok();
  return written_;
}

/// Unpacks the ranges that have arrived, in the order of each message's bytes.
bool Puller::unpack() {
  bool any = false;
  for (auto at = receiving_.begin(); at != receiving_.end();) {
    const size_t number = *at;
    Message &message = messages_[number];
    while (!message.inFlight.empty() && message.inFlight.front()->state == Slot::arrived) {
      Slot &slot = *message.inFlight.front();
      if (!slot.direct)
        options_.table->received()[number].packing.unpack(slot.begin, slot.end, slot.memory.get());
      message.landed = slot.end;
      message.server->unconfirmed.push_back({number, slot.end});
      --message.server->fetches;
      release(slot);
      message.inFlight.pop_front();
      any = true;
    }
    at = message.inFlight.empty() ? receiving_.erase(at) : std::next(at);
  }
  return any;
}

/// Runs at most one chunk of the local steps, which run in order.
bool Puller::runLocalSteps() {
  const std::vector<LocalStep> &locals = options_.table->locals();
  const uint32_t next = options_.progress->locals();
  if (next == locals.size())
    return false;
  const LocalStep &local = locals[next];
  for (const size_t number : local.received)
    if (options_.progress->confirmed(number) < options_.table->received()[number].packing.bytes())
      return false;
  if (!mayWrite())
    return false;
  if (copies_ < local.end)
    options_.table->copies().run(copies_++, false);
  if (copies_ == local.end)
    options_.progress->setLocals(next + 1);
  return true;
}

void Puller::confirmReads() {
  for (auto &[rank, connection] : connections_) {
    if (connection.ready && !connection.unconfirmed.empty() && connection.confirming == 0) {
      connection.confirming = connection.unconfirmed.size();
      send(connection, makeFrame(FrameKind::confirm, {version_.number, connection.lease}));
    }
    if (connection.fetches > 0 || connection.confirming > 0)
      ping(connection);
  }
}

/// Whether a server is the rank of the parent that this one reads from.
bool Puller::isParent(const Connection &connection) const {
  return assignment_.parent != kSources &&
         connection.worldRank ==
             options_.fleet.worldRank(assignment_.parent, options_.fleet.meshRankOf(options_.worldRank));
}

/// Leaves a parent that is lost or frozen.
void Puller::checkParent() {
  if (assignment_.parent == kSources)
    return;
  const uint32_t replica = assignment_.parent;
  const Connection &parent =
      connectionTo(options_.fleet.worldRank(replica, options_.fleet.meshRankOf(options_.worldRank)));
  const bool waiting = !parent.ready || parent.fetches > 0 || parent.confirming > 0;
  if (!waiting || Clock::now() - parent.lastSeen <= kUnresponsive)
    return;
  leaveParent();
  send(connectionTo(options_.fleet.sources()[0]), makeFrame(FrameKind::parentFailed, {replica}));
}

/// The sources serve the rest; what the parent has confirmed stays.
void Puller::leaveParent() {
  const uint32_t parent = std::exchange(assignment_.parent, kSources);
  disconnect(connectionTo(options_.fleet.worldRank(parent, options_.fleet.meshRankOf(options_.worldRank))));
}

std::string Puller::problemOf(const Connection &connection) const {
  return connection.ready || connection.problem.empty() ? options_.fleet.name(connection.worldRank) + " does not answer"
                                                        : connection.problem;
}

/// The first message that is not complete, for the text of a timeout.
std::string Puller::waitsFor() const {
  const std::vector<ReceivedMessage> &received = options_.table->received();
  for (size_t m = 0; m < messages_.size(); ++m) {
    if (messages_[m].confirmed == received[m].packing.bytes())
      continue;
    const uint32_t rank = serverOf(m);
    const auto server = connections_.find(rank);
    const bool unready = server != connections_.end() && !server->second.ready && !server->second.problem.empty();
    return "waited for message " + std::to_string(received[m].message) + " of version " +
           std::to_string(version_.number) + " from " + options_.fleet.name(rank) + ", of which " +
           std::to_string(messages_[m].confirmed) + " of " + std::to_string(received[m].packing.bytes()) +
           " bytes have arrived" + (unready ? "; " + server->second.problem : "");
  }
  return "the copies within the rank were not complete";
}

Result<std::vector<ReplicaInfo>> Puller::replicas(const Deadline &deadline) {
  const std::lock_guard lock(mutex_);
  deadline_ = deadline;
  polled_ = Clock::now();
  listed_.clear();
  listedCount_.reset();
  Connection &coordinator = connectionTo(options_.fleet.sources()[0]);
  for (bool asked = false; !listedCount_ || listed_.size() < *listedCount_;) {
    const bool any = handleEvents();
    if (passed(deadline))
      return timedOut("timed out: " + problemOf(coordinator));
    if (!ready(coordinator, kLongLookup)) {
      asked = false;
    } else if (!asked) {
      listed_.clear();
      listedCount_.reset();
      send(coordinator, makeFrame(FrameKind::list));
      asked = true;
    }
    wait(any);
  }
  return listed_;
}

} // namespace reshard::pull
