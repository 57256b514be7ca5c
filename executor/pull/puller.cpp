// SPDX-License-Identifier: Apache-2.0
#include "executor/pull/puller.h"

#include "rendezvous/bytes.h"
#include "support/random.h"

#include <algorithm>

namespace reshard::pull {

namespace {

using std::chrono::milliseconds;

/// The most ranges in flight from all servers; the number of messages, from the first that is not completely requested,
/// whose ranges are fetched.
constexpr size_t kInFlight = 16, kAhead = 256;
/// The first pause between attempts to find a process; the longest between looks into the store, and between attempts
/// to connect; the time in which a process must welcome this one.
constexpr milliseconds kLookAgain{20}, kLongestLook{200}, kLongestPause{1000}, kNoWelcome{2000};
/// A child leaves a parent that has sent no frame for kSilent although the child waits for an answer.
constexpr milliseconds kSilent{1000}, kPing{250};
/// If this process itself did not run for this time, it could not receive frames, so it counts no other as silent.
constexpr milliseconds kPaused{200};
/// The longest look into the store during a transfer, which it delays; shorter than kPaused.
constexpr milliseconds kShortLook{100};
/// The first pause after a refused attempt, and the longest.
constexpr milliseconds kAgain{2}, kLongestAgain{100};

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

// ---------------------------------------------------------------------------------------------------- connections

Puller::Connection &Puller::connectionTo(uint32_t worldRank) {
  const auto [found, added] = connections_.try_emplace(worldRank);
  if (added) {
    found->second.worldRank = worldRank;
    found->second.heard = Clock::now(); // a parent has the time of kSilent to answer
  }
  return found->second;
}

bool Puller::isDue(Connection &connection) {
  const Clock::time_point now = Clock::now();
  if (connection.peer && now >= connection.again) {
    disconnect(connection);
    connection.problem = options_.fleet.name(connection.worldRank) + " does not answer";
  }
  return !connection.peer && now >= connection.again;
}

bool Puller::ready(Connection &connection, std::chrono::milliseconds look) {
  if (connection.ready || !isDue(connection))
    return connection.ready;
  const Clock::time_point now = Clock::now();
  connection.again = now + kLookAgain;
  Deadline until = now + look;
  if (deadline_)
    until = std::min(*until, *deadline_);
  const Result<std::optional<ServerAddress>> found = options_.directory->find(connection.worldRank, until);
  if (!found.ok() || !*found) {
    connection.problem = found.ok() ? options_.fleet.name(connection.worldRank) + " has not opened this plan" +
                                          options_.directory->note(connection.worldRank)
                                    : found.status().message();
    const milliseconds longest = found.ok() ? kLongestLook : kLongestPause; // many ranks may ask the store
    connection.pause = std::clamp(2 * connection.pause, kLookAgain, longest);
    connection.again = Clock::now() + connection.pause;
    return false;
  }
  connect(connection, **found);
  return false;
}

void Puller::connect(Connection &connection, const ServerAddress &process) {
  const Clock::time_point now = Clock::now();
  // A process that has ended leaves its address in the store, but one that starts again has another token.
  const bool same = process.token == connection.token;
  if (same && now - connection.attempted < connection.pause) {
    connection.again = connection.attempted + connection.pause;
    return;
  }
  connection.pause = same ? std::min(2 * connection.pause, kLongestPause) : kLookAgain;
  connection.token = process.token;
  connection.address = process.address;
  connection.attempted = now;
  const Result<uint32_t> peer = messenger_->connect(process.address);
  if (!peer.ok()) {
    connection.problem =
        "cannot connect to " + options_.fleet.name(connection.worldRank) + ": " + peer.status().message();
    return;
  }
  connection.peer = *peer;
  connection.again = now + kNoWelcome;
  byPeer_[*peer] = &connection;
  send(connection, makeFrame(FrameKind::hello, {process.token, options_.worldRank, kProtocol}));
}

void Puller::disconnect(Connection &connection) {
  if (connection.peer) {
    messenger_->disconnect(*connection.peer);
    byPeer_.erase(*connection.peer);
  }
  connection.peer.reset();
  connection.ready = false;
  connection.again = Clock::now() + kLookAgain;
  discard(connection);
}

void Puller::release(Slot &slot) {
  slot.state = Slot::free;
  --inFlight_;
}

void Puller::discard(Connection &connection) {
  for (Slot &slot : connection.slots)
    if (slot.state != Slot::free)
      release(slot);
  connection.fetches = 0;
  connection.unconfirmed.clear();
  connection.confirming = 0;
  connection.leased = false;
  connection.lease = 0;
  for (size_t m = 0; m < messages_.size(); ++m) {
    Message &message = messages_[m];
    if (message.server != &connection)
      continue;
    const Packing &packing = options_.table->received()[m].packing;
    // Converted bytes are unpacked in ascending order from the first one.
    const bool restarts = packing.converts() && message.confirmed < packing.bytes();
    message.confirmed = restarts ? 0 : message.confirmed;
    message.next = message.landed = message.confirmed;
    message.inFlight.clear();
    message.server = nullptr;
    receiving_.erase(m);
    first_ = std::min(first_, m);
  }
}

void Puller::send(Connection &connection, const Frame &frame) {
  if (!connection.peer)
    return;
  if (const Status status = messenger_->send(*connection.peer, frame); !status.ok()) {
    connection.problem = options_.fleet.name(connection.worldRank) + ": " + status.message();
    disconnect(connection);
  }
}

void Puller::ping(Connection &connection) {
  if (const Clock::time_point now = Clock::now(); connection.ready && now - connection.pinged >= kPing) {
    connection.pinged = now;
    send(connection, makeFrame(FrameKind::ping));
  }
}

bool Puller::handleEvents() {
  bool any = false;
  for (int count = 0; count < 64; ++count, any = true) {
    const std::optional<MessengerEvent> event = messenger_->poll();
    if (!event)
      break;
    const auto found = byPeer_.find(event->peer);
    if (found != byPeer_.end())
      handle(*found->second, *event);
    else if (event->kind != MessengerEvent::kLost)
      messenger_->disconnect(event->peer); // this messenger only connects
  }
  return any;
}

void Puller::handle(Connection &connection, const MessengerEvent &event) {
  switch (event.kind) {
  case MessengerEvent::kArrived:
    connection.heard = Clock::now();
    return handleFrame(connection, event);
  case MessengerEvent::kReceived:
    if (event.token < kWindow && connection.slots[event.token].state == Slot::receiving) {
      if (!event.ok) {
        connection.problem = "a transfer from " + options_.fleet.name(connection.worldRank) + " failed";
        return disconnect(connection);
      }
      connection.slots[event.token].state = Slot::arrived;
    }
    return;
  case MessengerEvent::kLost:
    byPeer_.erase(event.peer);
    connection.peer.reset();
    connection.ready = false;
    connection.again = Clock::now() + kLookAgain;
    connection.problem =
        "the connection to " + options_.fleet.name(connection.worldRank) + " ended: " + event.reason.message();
    return discard(connection);
  case MessengerEvent::kSent:
    return;
  }
}

/// The slot that an answer is for; null if there is none.
Puller::Slot *Puller::find(Connection &connection, const Frame &frame) {
  const auto &words = frame.words;
  if (words[1] != version_.number || words[5] >= kWindow)
    return nullptr;
  Slot &slot = connection.slots[words[5]];
  const bool asked = slot.state == Slot::asked && slot.begin == words[3] && slot.end == words[4] &&
                     options_.table->received()[slot.message].message == words[2];
  return asked ? &slot : nullptr;
}

void Puller::handleFrame(Connection &connection, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  switch (kindOf(event.frame)) {
  case FrameKind::welcome:
    if (words[1] != connection.token)
      return disconnect(connection);
    connection.ready = true;
    connection.pause = kLookAgain;
    connection.problem.clear();
    if (held_ != 0 && connection.worldRank == options_.fleet.sources()[0] && connection.token == heldBy_)
      send(connection, makeFrame(FrameKind::resume, {held_}));
    return;
  case FrameKind::data:
    return arrived(connection, event);
  case FrameKind::askSender:
    if (Slot *const slot = find(connection, event.frame)) {
      Message &message = messages_[slot->message];
      message.askSender = true;
      std::erase(message.inFlight, slot);
      if (message.inFlight.empty()) {
        message.next = message.landed;
        message.server = nullptr;
        receiving_.erase(slot->message);
        first_ = std::min(first_, slot->message);
      }
      --connection.fetches;
      release(*slot);
    }
    return;
  case FrameKind::gone:
    if (find(connection, event.frame))
      refused(connection);
    return;
  case FrameKind::confirmed:
    if (words[1] == version_.number && connection.confirming > 0)
      confirmed(connection, words[2] != 0);
    return;
  default:
    if (connection.worldRank == options_.fleet.sources()[0])
      handleAnswer(event);
  }
}

/// Frames of the coordinator.
void Puller::handleAnswer(const MessengerEvent &event) {
  const auto &words = event.frame.words;
  switch (kindOf(event.frame)) {
  case FrameKind::assign:
    if (call_ != 0 && words[4] == call_) // not a late answer to an earlier call
      assigned_ = Assignment{words[1], {words[5], words[2]}, static_cast<uint32_t>(words[3])};
    return;
  case FrameKind::waiting: {
    const std::string newest = words[1] > 0 ? "the newest is " + std::to_string(words[1]) : "none is published";
    const std::string least = std::to_string(request_ ? request_->minVersion : 0);
    reason_ = "no source has published version >= " + least + "; " + newest;
    if (words[2] < options_.fleet.sources().size() && words[1] > 0)
      reason_ = options_.fleet.name(options_.fleet.sources()[words[2]]) + " has not published version " +
                std::to_string(words[1]);
    return;
  }
  case FrameKind::committed:
    committed_ = words[1];
    return;
  case FrameKind::repeat:
    repeated_ = words[1];
    return;
  case FrameKind::replaced:
    if (call_ != 0)
      error_ = invalid("another process has opened this plan as " + options_.fleet.name(options_.worldRank) +
                       "; expected one process for each rank");
    return;
  case FrameKind::listed: {
    if (words[2] == 0)
      listed_.clear();
    if (words[2] != listed_.size()) // of an earlier request, whose first frames were lost
      return;
    ByteReader reader(event.text);
    listedCount_ = words[1];
    while (reader.ok() && !reader.rest().empty()) {
      ReplicaInfo info;
      info.replica = reader.number<uint32_t>();
      info.ranks = reader.number<uint32_t>();
      info.version = reader.number<uint64_t>();
      info.state = static_cast<ReplicaInfo::State>(std::min<uint8_t>(reader.number<uint8_t>(), ReplicaInfo::kLost));
      listed_.push_back(info);
    }
    return;
  }
  default:
    return;
  }
}

/// The server has a range: reads it out of its memory, or receives it.
void Puller::arrived(Connection &connection, const MessengerEvent &event) {
  Slot *const slot = find(connection, event.frame);
  if (!slot)
    return;
  const uint64_t lease = event.frame.words[7];
  if (lease == 0 || (connection.lease != 0 && connection.lease != lease)) // it has changed its memory meanwhile
    return refused(connection);
  connection.lease = lease;
  if (!mayWrite())
    return;
  const uint64_t bytes = slot->end - slot->begin, address = event.frame.words[6];
  std::byte *const to =
      slot->direct ? options_.table->received()[slot->message].packing.contiguous() + slot->begin : slot->memory.get();
  if (address != 0) {
    if (!messenger_->readMemory(*connection.peer, to, address, bytes)) {
      connection.problem = "cannot read the memory of " + options_.fleet.name(connection.worldRank);
      return disconnect(connection);
    }
    slot->state = Slot::arrived;
    return;
  }
  const auto number = static_cast<uint64_t>(slot - connection.slots.data());
  const Status status = event.dataBytes == bytes
                            ? messenger_->receive(*connection.peer, event.data, to, number)
                            : failed("found " + std::to_string(event.dataBytes) + " bytes, expected the " +
                                     std::to_string(bytes) + " of the range");
  if (!status.ok()) {
    connection.problem =
        "a transfer from " + options_.fleet.name(connection.worldRank) + " failed: " + status.message();
    return disconnect(connection);
  }
  slot->state = Slot::receiving;
}

/// The server no longer serves the version.
void Puller::refused(Connection &connection) {
  failed_ = !isParent(connection);
  if (failed_)
    disconnect(connection);
  else
    leaveParent();
}

void Puller::confirmed(Connection &connection, bool valid) {
  if (!valid)
    return refused(connection);
  for (; connection.confirming > 0; --connection.confirming) {
    const Read read = connection.unconfirmed.front();
    connection.unconfirmed.pop_front();
    Message &message = messages_[read.message];
    const Packing &packing = options_.table->received()[read.message].packing;
    message.confirmed = read.end;
    // Converted bytes are written again if the server is lost, so they count when all are confirmed.
    if (!packing.converts() || read.end == packing.bytes())
      options_.progress->confirm(read.message, read.end);
    open_ -= read.end == packing.bytes();
  }
}

void Puller::wait(bool any) {
  const Clock::time_point now = Clock::now();
  if (now - polled_ > kPaused)
    for (auto &[rank, connection] : connections_)
      connection.heard = now;
  polled_ = now;
  ping(connectionTo(options_.fleet.sources()[0]));
  if (any)
    sleep_.reset();
  else
    sleep_.wait();
}

void Puller::idle() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock())
    return;
  handleEvents();
  Connection &coordinator = connectionTo(options_.fleet.sources()[0]);
  // By the address of the last attempt, since this thread must not use the caller's store.
  if (held_ != 0 && !coordinator.ready && isDue(coordinator))
    connect(coordinator, {coordinator.token, coordinator.address});
  ping(coordinator); // the coordinator learns that this process runs
}

// ---------------------------------------------------------------------------------------------------------- pulling

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
      } catch (const std::bad_alloc &) { // servers that were not told end the leases at their deadline
      }
    }
  } const call{*this};
  return attempts();
}

void Puller::endCall() {
  endTransfers();
  request_ = nullptr;
  call_ = 0;
  options_.server->setPulling(false);
  leaveServers();
}

Result<uint64_t> Puller::attempts() {
  call_ = std::max<uint64_t>(randomNumber(), 1);
  held_ = 0;
  milliseconds pause = kAgain;
  for (uint64_t failed = 0;;) {
    if (Status status = begin(failed); !status.ok())
      return status;
    assignment_ = *assigned_;
    if (assignment_.version != version_) {
      if (Status status = startVersion(assignment_.version); !status.ok())
        return status;
      pause = kAgain;
    }
    failed = 0;
    Outcome outcome = transfer();
    if (outcome == Outcome::again) {
      endTransfers();
      leaveServers();
      std::this_thread::sleep_for(pause); // the coordinator may not know yet what has changed
      pause = std::min(2 * pause, kLongestAgain);
      failed = assignment_.number;
      continue;
    }
    if (outcome == Outcome::done) {
      leaveServers();
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
  for (bool asked = false; !assigned_;) {
    const bool any = handleEvents();
    if (!error_.ok())
      return error_;
    if (assigned_)
      break;
    if (passed(deadline_))
      return timedOut("timed out: " + (coordinator.ready && !reason_.empty() ? reason_ : problemOf(coordinator)));
    if (!ready(coordinator, kNoWelcome)) {
      asked = false;
    } else if (!asked) {
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
  written_ = whole_ = false;
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
    connection.heard = polled_;
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
    if (repeated_ == assignment_.number || !coordinator.ready)
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

// -------------------------------------------------------------------------------------------------------- transfer

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
  if ((message.server && message.server != &server) || server.fetches == kWindow || !ready(server, kShortLook))
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
    server.heard = Clock::now();
  server.leased = true;
  message.server = &server;
  message.next = slot.end;
  message.inFlight.push_back(&slot);
  receiving_.insert(number);
  send(server, makeFrame(FrameKind::fetch, {version_.number, received.message, slot.begin, slot.end,
                                            static_cast<uint64_t>(&slot - server.slots.data()),
                                            messenger_->readsMemory(*server.peer), version_.birth}));
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
  if (!waiting || Clock::now() - parent.heard <= kSilent)
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
    if (!ready(coordinator, kNoWelcome)) {
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
