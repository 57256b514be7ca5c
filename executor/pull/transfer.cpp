// SPDX-License-Identifier: Apache-2.0
// run() asks for ranges, unpacks those that have arrived, and has them confirmed. What a server that is lost has not
// confirmed is fetched again, from the sources if that was the parent.
#include "executor/pull/transfer.h"

#include <algorithm>
#include <utility>

namespace reshard::pull {

namespace {

/// The most ranges in flight from all servers; the number of messages, from the first that is not completely requested,
/// whose ranges are fetched.
constexpr size_t kInFlight = 16, kAhead = 256;
/// A child leaves a parent that has sent no frame for this time although the child waits for an answer.
constexpr std::chrono::milliseconds kUnresponsive{1000};

} // namespace

// -------------------------------------------------------------------------------------------------------- the messages

void MessageReads::restart() {
  const std::vector<ReceivedMessage> &received = options_.table->received();
  messages_.clear();
  messages_.resize(received.size());
  first_ = 0;
  open_ = static_cast<size_t>(
      std::count_if(received.begin(), received.end(), [](const auto &each) { return each.packing.bytes() > 0; }));
}

std::pair<size_t, size_t> MessageReads::window() {
  while (first_ < messages_.size() && messages_[first_].next == packing(first_).bytes())
    ++first_;
  return {first_, std::min(messages_.size(), first_ + kAhead)};
}

bool MessageReads::canFetch(size_t message) const {
  return messages_[message].next < packing(message).bytes() &&
         options_.progress->locals() >= options_.table->received()[message].localsBefore;
}

void MessageReads::fetch(size_t number, ServerConnection &server, FetchedRange &slot) {
  Message &message = messages_[number];
  slot.message = number;
  slot.begin = message.next;
  slot.end = std::min(packing(number).bytes(), message.next + options_.rangeBytes);
  slot.direct = packing(number).contiguous() != nullptr;
  if (!slot.direct && !slot.memory)
    slot.memory.reset(new std::byte[options_.rangeBytes]);
  slot.state = FetchedRange::asked;
  message.server = &server;
  message.next = slot.end;
  message.inFlight.push_back(&slot);
  receiving_.insert(number);
}

bool MessageReads::unpack() {
  bool any = false;
  for (auto at = receiving_.begin(); at != receiving_.end();) {
    const size_t number = *at;
    Message &message = messages_[number];
    while (!message.inFlight.empty() && message.inFlight.front()->state == FetchedRange::arrived) {
      FetchedRange &slot = *message.inFlight.front();
      if (!slot.direct)
        packing(number).unpack(slot.begin, slot.end, slot.memory.get());
      message.landed = slot.end;
      message.server->reads.unconfirmed.push_back({number, slot.end});
      message.server->reads.release(slot);
      message.inFlight.pop_front();
      any = true;
    }
    at = message.inFlight.empty() ? receiving_.erase(at) : std::next(at);
  }
  return any;
}

void MessageReads::askSender(ServerConnection &server, FetchedRange &slot) {
  Message &message = messages_[slot.message];
  message.askSender = true;
  std::erase(message.inFlight, &slot);
  if (message.inFlight.empty()) {
    message.next = message.landed;
    message.server = nullptr;
    receiving_.erase(slot.message);
    first_ = std::min(first_, slot.message);
  }
  server.reads.release(slot);
}

void MessageReads::confirm(const ServerReads::Read &read) {
  messages_[read.message].confirmed = read.end;
  // Converted bytes are written again if the server is lost, so they count when all are confirmed.
  const bool whole = read.end == packing(read.message).bytes();
  if (whole || !packing(read.message).converts())
    options_.progress->confirm(read.message, read.end);
  open_ -= whole;
}

void MessageReads::discard(ServerConnection &server) {
  ServerReads &reads = server.reads;
  for (FetchedRange &slot : reads.slots)
    slot.state = FetchedRange::free;
  reads.fetches = 0;
  reads.unconfirmed.clear();
  reads.confirming = 0;
  reads.leased = false;
  reads.lease = 0;
  for (size_t m = 0; m < messages_.size(); ++m) {
    Message &message = messages_[m];
    if (message.server != &server)
      continue;
    // Converted bytes are unpacked in ascending order from the first one.
    const bool restarts = packing(m).converts() && message.confirmed < packing(m).bytes();
    message.confirmed = restarts ? 0 : message.confirmed;
    message.next = message.landed = message.confirmed;
    message.inFlight.clear();
    message.server = nullptr;
    receiving_.erase(m);
    first_ = std::min(first_, m);
  }
}

std::optional<ServerReads::Read> MessageReads::missing() const {
  for (size_t m = 0; m < messages_.size(); ++m)
    if (messages_[m].confirmed < packing(m).bytes())
      return ServerReads::Read{m, messages_[m].confirmed};
  return {};
}

// -------------------------------------------------------------------------------------------------------- the transfer

Status VersionTransfer::start(const Version &version) {
  endFetches();
  version_ = version;
  written_ = whole_ = false;
  reads_.restart();
  copies_ = 0;
  Status status = options_.server->serve(version);
  if (!status.ok())
    version_ = {}; // the next pull tries again
  return status;
}

Result<bool> VersionTransfer::run(const Assignment &assignment) {
  assignment_ = assignment;
  call_.again = false;
  connections_.restartSilence();
  while (!finished()) {
    bool any = connections_.handleEvents();
    any = reads_.unpack() || any;
    any = runLocalSteps() || any;
    if (!call_.error.ok())
      return call_.error;
    if (call_.again)
      return false;
    confirmReads();
    fetchMore();
    checkParent();
    if (passed(connections_.deadline()))
      return timedOut("timed out: " + waitsFor());
    connections_.wait(any);
  }
  return true;
}

Status VersionTransfer::finish() {
  Status status = whole_ ? Status() : call_.request->afterWriting();
  whole_ = status.ok();
  return status;
}

void VersionTransfer::endFetches() {
  for (auto &[rank, server] : connections_.all())
    if (server.reads.fetches > 0)
      connections_.disconnect(server);
}

void VersionTransfer::leaveServers() {
  for (auto &[rank, server] : connections_.all()) {
    if (!server.reads.leased)
      continue;
    if (server.ready)
      connections_.send(server, makeFrame(FrameKind::leave, {version_.number}));
    reads_.discard(server);
  }
}

bool VersionTransfer::finished() const {
  return reads_.complete() && options_.progress->locals() == options_.table->locals().size();
}

// -------------------------------------------------------------------------------------------------------- what it asks

/// The world rank that serves a message.
uint32_t VersionTransfer::serverOf(size_t number) const {
  const Fleet &fleet = options_.fleet;
  const uint32_t sender = options_.table->received()[number].sender;
  if (fleet.isTarget(sender))
    return fleet.worldRank(fleet.replicaOf(options_.worldRank), fleet.meshRankOf(sender));
  if (assignment_.parent != kSources && !reads_.asksSender(number))
    return parentRank();
  return sender;
}

void VersionTransfer::fetchMore() {
  size_t inFlight = 0;
  for (const auto &[rank, server] : connections_.all())
    inFlight += server.reads.fetches;
  const auto [first, end] = reads_.window();
  for (size_t m = first; m < end && inFlight < kInFlight; ++m)
    while (inFlight < kInFlight && fetchOne(m))
      ++inFlight;
}

/// Asks for the next range of a message. Returns whether it could.
bool VersionTransfer::fetchOne(size_t number) {
  if (!reads_.canFetch(number))
    return false;
  ServerConnection &server = connections_.to(serverOf(number));
  ServerReads &reads = server.reads;
  if (!reads_.canFetch(number, server) || reads.fetches == kWindow ||
      !connections_.ready(server, ServerConnections::kShortLookup))
    return false;
  FetchedRange &slot = *std::find_if(reads.slots.begin(), reads.slots.end(),
                                     [](const FetchedRange &each) { return each.state == FetchedRange::free; });
  reads_.fetch(number, server, slot);
  if (reads.fetches++ == 0)
    server.lastSeen = Clock::now();
  reads.leased = true;
  connections_.send(
      server, makeFrame(FrameKind::fetch, {version_.number, options_.table->received()[number].message, slot.begin,
                                           slot.end, static_cast<uint64_t>(&slot - reads.slots.data()),
                                           connections_.messenger().readsMemory(*server.peer), version_.incarnation}));
  return server.ready;
}

void VersionTransfer::confirmReads() {
  for (auto &[rank, server] : connections_.all()) {
    ServerReads &reads = server.reads;
    if (server.ready && !reads.unconfirmed.empty() && reads.confirming == 0) {
      reads.confirming = reads.unconfirmed.size();
      connections_.send(server, makeFrame(FrameKind::confirm, {version_.number, reads.lease}));
    }
    if (reads.waits())
      connections_.ping(server);
  }
}

bool VersionTransfer::mayWrite() {
  if (written_ || !call_.error.ok())
    return call_.error.ok();
  call_.error = call_.request->beforeWriting();
  written_ = call_.error.ok();
  return written_;
}

/// Runs at most one chunk of the local steps, which run in order.
bool VersionTransfer::runLocalSteps() {
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

// ---------------------------------------------------------------------------------------------------- what is answered

void VersionTransfer::arrived(ServerConnection &server, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  if (kindOf(event.frame) == FrameKind::confirmed) {
    if (words[1] == version_.number && server.reads.confirming > 0)
      confirmed(server, words[2] != 0);
  } else if (FetchedRange *const slot = find(server, event.frame)) {
    if (kindOf(event.frame) == FrameKind::data)
      read(server, *slot, event);
    else if (kindOf(event.frame) == FrameKind::askSender)
      reads_.askSender(server, *slot); // the parent has the bytes in another form
    else
      refused(server);
  }
}

/// The slot that an answer is for; null if there is none.
FetchedRange *VersionTransfer::find(ServerConnection &server, const Frame &frame) {
  const auto &words = frame.words;
  if (words[1] != version_.number || words[5] >= kWindow)
    return nullptr;
  FetchedRange &slot = server.reads.slots[words[5]];
  const bool asked = slot.state == FetchedRange::asked && slot.begin == words[3] && slot.end == words[4] &&
                     options_.table->received()[slot.message].message == words[2];
  return asked ? &slot : nullptr;
}

/// The server has a range: reads it out of its memory, or receives it.
void VersionTransfer::read(ServerConnection &server, FetchedRange &slot, const MessengerEvent &event) {
  const uint64_t lease = event.frame.words[7];
  if (lease == 0 || (server.reads.lease != 0 && server.reads.lease != lease)) // it has changed its memory meanwhile
    return refused(server);
  server.reads.lease = lease;
  if (!mayWrite())
    return;
  Messenger &messenger = connections_.messenger();
  const uint64_t bytes = slot.end - slot.begin, address = event.frame.words[6];
  std::byte *const to =
      slot.direct ? options_.table->received()[slot.message].packing.contiguous() + slot.begin : slot.memory.get();
  if (address != 0) {
    if (!messenger.readMemory(*server.peer, to, address, bytes)) {
      server.problem = "cannot read the memory of " + options_.fleet.name(server.worldRank);
      return connections_.disconnect(server);
    }
    slot.state = FetchedRange::arrived;
    return;
  }
  const auto number = static_cast<uint64_t>(&slot - server.reads.slots.data());
  const Status status = event.dataBytes == bytes
                            ? messenger.receive(*server.peer, event.data, to, number)
                            : failed("found " + std::to_string(event.dataBytes) + " bytes, expected the " +
                                     std::to_string(bytes) + " of the range");
  if (!status.ok()) {
    server.problem = "a transfer from " + options_.fleet.name(server.worldRank) + " failed: " + status.message();
    return connections_.disconnect(server);
  }
  slot.state = FetchedRange::receiving;
}

void VersionTransfer::received(ServerConnection &server, const MessengerEvent &event) {
  if (event.token >= kWindow || server.reads.slots[event.token].state != FetchedRange::receiving)
    return;
  if (!event.ok) {
    server.problem = "a transfer from " + options_.fleet.name(server.worldRank) + " failed";
    return connections_.disconnect(server);
  }
  server.reads.slots[event.token].state = FetchedRange::arrived;
}

void VersionTransfer::confirmed(ServerConnection &server, bool valid) {
  if (!valid)
    return refused(server);
  for (ServerReads &reads = server.reads; reads.confirming > 0; --reads.confirming) {
    reads_.confirm(reads.unconfirmed.front());
    reads.unconfirmed.pop_front();
  }
}

/// The server no longer serves the version.
void VersionTransfer::refused(ServerConnection &server) {
  call_.again = assignment_.parent == kSources || server.worldRank != parentRank();
  if (call_.again)
    connections_.disconnect(server);
  else
    leaveParent();
}

// ---------------------------------------------------------------------------------------------------------- the parent

uint32_t VersionTransfer::parentRank() const {
  return options_.fleet.worldRank(assignment_.parent, options_.fleet.meshRankOf(options_.worldRank));
}

/// Leaves a parent that is lost or frozen.
void VersionTransfer::checkParent() {
  if (assignment_.parent == kSources)
    return;
  const uint32_t replica = assignment_.parent;
  const ServerConnection &parent = connections_.to(parentRank());
  const bool waiting = !parent.ready || parent.reads.waits();
  if (!waiting || Clock::now() - parent.lastSeen <= kUnresponsive)
    return;
  leaveParent();
  connections_.send(connections_.coordinator(), makeFrame(FrameKind::parentFailed, {replica}));
}

/// The sources serve the rest; what the parent has confirmed stays.
void VersionTransfer::leaveParent() {
  ServerConnection &parent = connections_.to(parentRank());
  assignment_.parent = kSources;
  connections_.disconnect(parent);
}

/// The first message that is not complete, for the text of a timeout.
std::string VersionTransfer::waitsFor() {
  const std::optional<ServerReads::Read> missing = reads_.missing();
  if (!missing)
    return "the copies within the rank were not complete";
  const ReceivedMessage &message = options_.table->received()[missing->message];
  const ServerConnection &server = connections_.to(serverOf(missing->message));
  const bool unready = !server.ready && !server.problem.empty();
  return "waited for message " + std::to_string(message.message) + " of version " + std::to_string(version_.number) +
         " from " + options_.fleet.name(server.worldRank) + ", of which " + std::to_string(missing->end) + " of " +
         std::to_string(message.packing.bytes()) + " bytes have arrived" + (unready ? "; " + server.problem : "");
}

} // namespace reshard::pull
