// SPDX-License-Identifier: Apache-2.0
// The connections of a process that pulls, and the frames that arrive.
#include "executor/pull/puller.h"

#include "executor/rendezvous/bytes.h"

#include <algorithm>

namespace reshard::pull {

namespace {

using std::chrono::milliseconds;

/// The first pause between attempts to find a process; the longest between lookups in the store, and between attempts
/// to connect; the time in which a process must welcome this one.
constexpr milliseconds kRetry{20}, kMaxLookupPause{200}, kMaxRetryPause{1000}, kNoWelcome{2000};
/// How often a process asks again in a call after the coordinator has taken another one for this rank.
constexpr int kReplacements = 3;
constexpr milliseconds kPing{250};

} // namespace

Puller::Connection &Puller::connectionTo(uint32_t worldRank) {
  const auto [found, added] = connections_.try_emplace(worldRank);
  if (added) {
    found->second.worldRank = worldRank;
    found->second.lastSeen = Clock::now(); // a new server has the full time to answer
  }
  return found->second;
}

bool Puller::isDue(Connection &connection) {
  const Clock::time_point now = Clock::now();
  if (connection.peer && now >= connection.retryAt) {
    disconnect(connection);
    connection.problem = options_.fleet.name(connection.worldRank) + " does not answer";
  }
  return !connection.peer && now >= connection.retryAt;
}

bool Puller::ready(Connection &connection, std::chrono::milliseconds lookup) {
  if (connection.ready || !isDue(connection))
    return connection.ready;
  const Clock::time_point now = Clock::now();
  connection.retryAt = now + kRetry;
  Deadline until = now + lookup;
  if (deadline_)
    until = std::min(*until, *deadline_);
  until.interrupt = deadline_.interrupt;
  const Result<std::optional<ServerAddress>> found = options_.directory->find(connection.worldRank, until);
  if (!found.ok() || !*found) {
    connection.problem = found.ok() ? options_.fleet.name(connection.worldRank) + " has not opened this plan" +
                                          options_.directory->note(connection.worldRank)
                                    : found.status().message();
    const milliseconds longest = found.ok() ? kMaxLookupPause : kMaxRetryPause; // many ranks may ask the store
    connection.pause = std::clamp(2 * connection.pause, kRetry, longest);
    connection.retryAt = Clock::now() + connection.pause;
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
    connection.retryAt = connection.attempted + connection.pause;
    return;
  }
  connection.pause = same ? std::min(2 * connection.pause, kMaxRetryPause) : kRetry;
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
  connection.retryAt = now + kNoWelcome;
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
  connection.retryAt = Clock::now() + kRetry;
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

void Puller::send(Connection &connection, const Frame &frame, std::string_view text) {
  if (!connection.peer)
    return;
  if (const Status status = messenger_->send(*connection.peer, frame, text); !status.ok()) {
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
    connection.lastSeen = Clock::now();
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
    connection.retryAt = Clock::now() + kRetry;
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
    connection.pause = kRetry;
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
  case FrameKind::digests:
    return addDigests(connection, event);
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
    // The coordinator may have read a frame of a process of this rank that has ended after those of this one. So this
    // process asks again, and gives up if there really are two, which replace each other in turns.
    if (call_ != 0 && replacements_++ < kReplacements)
      replaced_ = true;
    else if (call_ != 0)
      error_ = invalid("another process has opened this plan as " + options_.fleet.name(options_.worldRank) +
                       "; expected one process for each rank");
    return;
  case FrameKind::listed: {
    if (words[2] == 0)
      listed_.clear();
    if (words[2] != listed_.size()) // an answer to an earlier request, whose first frames were lost
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

} // namespace reshard::pull
