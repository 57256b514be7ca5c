// SPDX-License-Identifier: Apache-2.0
// Attempts to connect, with pauses that grow; pings; the silence of servers, in which a pause of this process itself
// does not count.
#include "executor/pull/connections.h"

#include <algorithm>
#include <utility>

namespace reshard::pull {

namespace {

using std::chrono::milliseconds;

/// The first pause between attempts to find a process; the longest between lookups in the store, and between attempts
/// to connect; the time in which a process must welcome this one.
constexpr milliseconds kRetry{20}, kMaxLookupPause{200}, kMaxRetryPause{1000}, kNoWelcome{2000};
constexpr milliseconds kPing{250};
/// If this process itself did not run for this time, it could not receive frames, so it counts no other as
/// unresponsive.
constexpr milliseconds kPaused{200};
static_assert(ServerConnections::kShortLookup < kPaused);

} // namespace

ServerConnection &ServerConnections::to(uint32_t worldRank) {
  const auto [found, added] = connections_.try_emplace(worldRank);
  if (added) {
    found->second.worldRank = worldRank;
    found->second.lastSeen = Clock::now(); // a new server has the full time to answer
  }
  return found->second;
}

bool ServerConnections::isDue(ServerConnection &connection) {
  const Clock::time_point now = Clock::now();
  if (connection.peer && now >= connection.retryAt) {
    disconnect(connection);
    connection.problem = options_.fleet.name(connection.worldRank) + " does not answer";
  }
  return !connection.peer && now >= connection.retryAt;
}

bool ServerConnections::ready(ServerConnection &connection, milliseconds longestLookup) {
  if (connection.ready || !isDue(connection))
    return connection.ready;
  const Clock::time_point now = Clock::now();
  connection.retryAt = now + kRetry;
  Deadline until = now + longestLookup;
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

void ServerConnections::retry(ServerConnection &connection) {
  if (!connection.ready && isDue(connection))
    connect(connection, connection.process);
}

void ServerConnections::connect(ServerConnection &connection, const ServerAddress &process) {
  const Clock::time_point now = Clock::now();
  // A process that has ended leaves its address in the store, but one that starts again has another token.
  const bool same = process.token == connection.process.token;
  if (same && now - connection.attempted < connection.pause) {
    connection.retryAt = connection.attempted + connection.pause;
    return;
  }
  connection.pause = same ? std::min(2 * connection.pause, kMaxRetryPause) : kRetry;
  connection.process = process;
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

void ServerConnections::disconnect(ServerConnection &connection) {
  if (connection.peer) {
    messenger_->disconnect(*connection.peer);
    byPeer_.erase(*connection.peer);
  }
  connection.peer.reset();
  connection.ready = false;
  connection.retryAt = Clock::now() + kRetry;
  listener_.ended(connection);
}

void ServerConnections::send(ServerConnection &connection, const Frame &frame, std::string_view text) {
  if (!connection.peer)
    return;
  if (const Status status = messenger_->send(*connection.peer, frame, text); !status.ok()) {
    connection.problem = options_.fleet.name(connection.worldRank) + ": " + status.message();
    disconnect(connection);
  }
}

void ServerConnections::ping(ServerConnection &connection) {
  if (const Clock::time_point now = Clock::now(); connection.ready && now - connection.pinged >= kPing) {
    connection.pinged = now;
    send(connection, makeFrame(FrameKind::ping));
  }
}

bool ServerConnections::handleEvents() {
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

void ServerConnections::handle(ServerConnection &connection, const MessengerEvent &event) {
  switch (event.kind) {
  case MessengerEvent::kArrived:
    connection.lastSeen = Clock::now();
    if (kindOf(event.frame) != FrameKind::welcome)
      return listener_.arrived(connection, event);
    if (event.frame.words[1] != connection.process.token)
      return disconnect(connection);
    connection.ready = true;
    connection.pause = kRetry;
    connection.problem.clear();
    return listener_.welcomed(connection);
  case MessengerEvent::kReceived:
    return listener_.received(connection, event);
  case MessengerEvent::kLost:
    connection.problem =
        "the connection to " + options_.fleet.name(connection.worldRank) + " ended: " + event.reason.message();
    byPeer_.erase(event.peer);
    connection.peer.reset();
    return disconnect(connection);
  case MessengerEvent::kSent:
    return;
  }
}

void ServerConnections::wait(bool any) {
  if (Clock::now() - polled_ > kPaused)
    restartSilence();
  polled_ = Clock::now();
  ping(coordinator());
  if (any)
    sleep_.reset();
  else
    sleep_.wait();
}

void ServerConnections::restartSilence() {
  polled_ = Clock::now();
  for (auto &[rank, connection] : connections_)
    connection.lastSeen = polled_;
}

std::string ServerConnections::problemOf(const ServerConnection &connection) const {
  return connection.ready || connection.problem.empty() ? options_.fleet.name(connection.worldRank) + " does not answer"
                                                        : connection.problem;
}

} // namespace reshard::pull
