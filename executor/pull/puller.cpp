// SPDX-License-Identifier: Apache-2.0
// The phases of a pull, which attempts() repeats until all succeed, and the requests to the coordinator.
#include "executor/pull/puller.h"

#include "base/random.h"
#include "executor/rendezvous/bytes.h"

#include <algorithm>
#include <utility>

namespace reshard::pull {

namespace {

using std::chrono::milliseconds;

/// The first pause after a refused attempt, and the longest.
constexpr milliseconds kFirstPause{2}, kMaxPause{100};
/// The pause before this process asks again when the coordinator serves another process of its rank, and how often it
/// asks again in a call.
constexpr milliseconds kReplaced{100};
constexpr int kReplacements = 3;

uint64_t millisecondsUntil(const Deadline &deadline) {
  if (!deadline)
    return 1'000'000'000;
  const auto left = std::chrono::duration_cast<milliseconds>(*deadline - std::chrono::steady_clock::now()).count();
  return static_cast<uint64_t>(std::max<int64_t>(left, 0));
}

} // namespace

Puller::Puller(std::unique_ptr<Messenger> messenger, PullerOptions options)
    : options_(std::move(options)), connections_(std::move(messenger), options_, *this),
      coordinator_(options_, connections_, call_), transfer_(options_, connections_, call_) {}

Result<uint64_t> Puller::pull(const PullRequest &request) {
  const std::lock_guard lock(mutex_);
  connections_.setDeadline(request.deadline);
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
  call_ = {&request, std::max<uint64_t>(randomNumber(), 1), false, {}};
  return attempts();
}

void Puller::endCall() {
  transfer_.endFetches();
  call_ = {};
  check_.reset();
  options_.server->setPulling(false);
  transfer_.leaveServers();
}

Result<uint64_t> Puller::attempts() {
  coordinator_.start();
  milliseconds pause = kFirstPause;
  for (uint64_t failed = 0;;) {
    const Result<Assignment> assignment = coordinator_.begin(failed);
    if (!assignment.ok())
      return assignment.status();
    if (assignment->version != transfer_.version()) {
      check_.reset();
      pause = kFirstPause;
      if (Status status = transfer_.start(assignment->version); !status.ok())
        return status;
    }
    const Result<bool> fetched = fetch(*assignment);
    if (!fetched.ok())
      return fetched.status();
    failed = *fetched ? 0 : assignment->number;
    if (!*fetched) {
      transfer_.endFetches();
      transfer_.leaveServers();
      std::this_thread::sleep_for(pause); // the coordinator may not know yet what has changed
      pause = std::min(2 * pause, kMaxPause);
      continue;
    }
    const Result<bool> completed = coordinator_.complete(*assignment);
    if (!completed.ok())
      return completed.status();
    if (!*completed)
      continue;
    if (Status status = transfer_.finish(); !status.ok())
      return status;
    coordinator_.hold(*assignment);
    return assignment->version.number;
  }
}

Result<bool> Puller::fetch(const Assignment &assignment) {
  if (call_.request->check) {
    if (!check_)
      check_.emplace(options_, connections_, call_, assignment.version);
    if (Result<bool> collected = check_->collect(); !collected.ok() || !*collected)
      return collected;
  }
  Result<bool> fetched = transfer_.run(assignment);
  if (!fetched.ok() || !*fetched)
    return fetched;
  transfer_.leaveServers();
  if (Status status = compare(); !status.ok())
    return status;
  return true;
}

Status Puller::compare() {
  const Result<std::string> wrong = check_ ? check_->compare() : std::string();
  if (!wrong.ok() || wrong->empty())
    return wrong.status();
  Status error = failed("the memory of " + options_.fleet.name(options_.worldRank) + " differs from version " +
                        std::to_string(transfer_.version().number) + " of the source: wrong are the tensors " + *wrong);
  if (transfer_.parent() != kSources) { // the bytes may have been wrong there: the next pull reads from the sources
    error = std::move(error).withSuffix("; it has read from replica " + std::to_string(transfer_.parent()));
    connections_.send(connections_.coordinator(), makeFrame(FrameKind::parentFailed, {transfer_.parent()}));
  }
  // The next pull writes all bytes, and no replica reads wrong ones meanwhile.
  const Status dropped = transfer_.start({});
  return dropped.ok() ? error : dropped;
}

Result<std::vector<ReplicaInfo>> Puller::replicas(const Deadline &deadline) {
  const std::lock_guard lock(mutex_);
  connections_.setDeadline(deadline);
  return coordinator_.list();
}

void Puller::idle() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock())
    return;
  connections_.handleEvents();
  coordinator_.idle();
}

void Puller::arrived(ServerConnection &connection, const MessengerEvent &event) {
  switch (kindOf(event.frame)) {
  case FrameKind::data:
  case FrameKind::askSender:
  case FrameKind::gone:
  case FrameKind::confirmed:
    return transfer_.arrived(connection, event);
  case FrameKind::digests:
    if (check_)
      check_->arrived(connection, event);
    return;
  default:
    if (connections_.isCoordinator(connection))
      coordinator_.arrived(event);
  }
}

// ----------------------------------------------------------------------------------------------------- the coordinator

void CoordinatorClient::start() {
  held_ = 0;
  replacements_ = 0;
  replaced_ = false;
}

Result<Assignment> CoordinatorClient::begin(uint64_t failed) {
  assigned_.reset();
  reason_.clear();
  ServerConnection &coordinator = connections_.coordinator();
  Clock::time_point again{}; // do not ask before
  for (bool asked = false;;) {
    const bool any = connections_.handleEvents();
    if (!call_.error.ok())
      return call_.error;
    if (std::exchange(replaced_, false)) {
      assigned_.reset(); // the coordinator has forgotten it
      asked = false;
      again = Clock::now() + kReplaced;
    }
    if (assigned_)
      return *assigned_;
    const Deadline &deadline = connections_.deadline();
    if (passed(deadline))
      return timedOut("timed out: " +
                      (coordinator.ready && !reason_.empty() ? reason_ : connections_.problemOf(coordinator)));
    if (!connections_.ready(coordinator, ServerConnections::kLongLookup)) {
      asked = false;
    } else if (!asked && Clock::now() >= again) {
      connections_.send(coordinator, makeFrame(FrameKind::begin, {call_.request->minVersion, call_.number, failed,
                                                                  millisecondsUntil(deadline)}));
      asked = true;
    }
    connections_.wait(any);
  }
}

Result<bool> CoordinatorClient::complete(const Assignment &assignment) {
  committed_.reset();
  repeated_.reset();
  ServerConnection &coordinator = connections_.coordinator();
  for (bool asked = false;;) {
    const bool any = connections_.handleEvents();
    if (committed_ == assignment.number)
      return true;
    if (!call_.error.ok())
      return call_.error;
    // A coordinator that was lost is asked by begin(), since it may be a new process.
    if (repeated_ == assignment.number || replaced_ || !coordinator.ready)
      return false;
    if (!asked)
      connections_.send(coordinator, makeFrame(FrameKind::complete, {assignment.number}));
    asked = true;
    if (passed(connections_.deadline()))
      return timedOut("timed out: this rank has version " + std::to_string(assignment.version.number) +
                      ", but other ranks of replica " + std::to_string(options_.fleet.replicaOf(options_.worldRank)) +
                      " have not completed it");
    connections_.wait(any);
  }
}

void CoordinatorClient::hold(const Assignment &assignment) {
  held_ = assignment.number;
  heldBy_ = connections_.coordinator().process.token;
}

Result<std::vector<ReplicaInfo>> CoordinatorClient::list() {
  listed_ = {};
  ServerConnection &coordinator = connections_.coordinator();
  for (bool asked = false; !listed_.complete();) {
    const bool any = connections_.handleEvents();
    if (passed(connections_.deadline()))
      return timedOut("timed out: " + connections_.problemOf(coordinator));
    if (!connections_.ready(coordinator, ServerConnections::kLongLookup)) {
      asked = false;
    } else if (!asked) {
      listed_ = {};
      connections_.send(coordinator, makeFrame(FrameKind::list));
      asked = true;
    }
    connections_.wait(any);
  }
  return listed_.replicas;
}

void CoordinatorClient::welcomed(ServerConnection &connection) {
  if (held_ != 0 && connections_.isCoordinator(connection) && connection.process.token == heldBy_)
    connections_.send(connection, makeFrame(FrameKind::resume, {held_}));
}

void CoordinatorClient::idle() {
  ServerConnection &coordinator = connections_.coordinator();
  // By the address of the last attempt, since this thread must not use the caller's store.
  if (held_ != 0)
    connections_.retry(coordinator);
  connections_.ping(coordinator);
}

void CoordinatorClient::arrived(const MessengerEvent &event) {
  const auto &words = event.frame.words;
  switch (kindOf(event.frame)) {
  case FrameKind::assign:
    if (call_.number != 0 && words[4] == call_.number) // not a late answer to an earlier call
      assigned_ = Assignment{words[1], {words[5], words[2]}, static_cast<uint32_t>(words[3])};
    return;
  case FrameKind::waiting: {
    const std::vector<uint32_t> &sources = options_.fleet.sources();
    const std::string newest = words[1] > 0 ? "the newest is " + std::to_string(words[1]) : "none is published";
    const std::string least = std::to_string(call_.request ? call_.request->minVersion : 0);
    reason_ = "no source has published version >= " + least + "; " + newest;
    if (words[2] < sources.size() && words[1] > 0)
      reason_ = options_.fleet.name(sources[words[2]]) + " has not published version " + std::to_string(words[1]);
    return;
  }
  case FrameKind::committed:
    committed_ = words[1];
    return;
  case FrameKind::repeat:
    repeated_ = words[1];
    return;
  case FrameKind::replaced:
    // The coordinator may have read a frame of a process of this rank that has ended after those of this one. So this
    // process asks again, and gives up if there really are two, which replace each other in turns.
    if (call_.number != 0 && replacements_++ < kReplacements)
      replaced_ = true;
    else if (call_.number != 0)
      call_.error = invalid("another process has opened this plan as " + options_.fleet.name(options_.worldRank) +
                            "; expected one process for each rank");
    return;
  case FrameKind::listed:
    return addListed(event);
  default:
    return;
  }
}

void CoordinatorClient::addListed(const MessengerEvent &event) {
  const auto &words = event.frame.words;
  if (words[2] == 0)
    listed_.replicas.clear();
  if (words[2] != listed_.replicas.size()) // an answer to an earlier request, whose first frames were lost
    return;
  ByteReader reader(event.text);
  listed_.count = words[1];
  while (reader.ok() && !reader.rest().empty()) {
    ReplicaInfo info;
    info.replica = reader.number<uint32_t>();
    info.ranks = reader.number<uint32_t>();
    info.version = reader.number<uint64_t>();
    info.state = static_cast<ReplicaInfo::State>(std::min<uint8_t>(reader.number<uint8_t>(), ReplicaInfo::kLost));
    listed_.replicas.push_back(info);
  }
}

} // namespace reshard::pull
