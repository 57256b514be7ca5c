// SPDX-License-Identifier: Apache-2.0
// The connections of a process that pulls. Their servers are found in the store; a connection that ends is made again.
#pragma once

#include "base/backoff.h"
#include "executor/pull/server.h"

namespace reshard::pull {

/// The rank that pulls, and the objects that the puller uses, which outlive it.
struct PullerOptions {
  Fleet fleet;
  uint32_t worldRank = 0;
  Directory *directory = nullptr;
  MessageTable *table = nullptr;
  PullProgress *progress = nullptr;
  Server *server = nullptr;
  uint64_t rangeBytes = kRangeBytes; // smaller in tests
};

/// A range of a message that is being fetched.
struct FetchedRange {
  enum State { free, asked, receiving, arrived } state = free;
  size_t message = 0;
  uint64_t begin = 0, end = 0;
  std::unique_ptr<std::byte[]> memory;
  bool direct = false; // received into the target's memory
};

/// What a transfer reads from one server.
struct ServerReads {
  /// Bytes of a message that were read, but not confirmed yet.
  struct Read {
    size_t message;
    uint64_t end;
  };
  uint32_t fetches = 0; // how many are in flight
  std::array<FetchedRange, kWindow> slots;
  std::deque<Read> unconfirmed;
  size_t confirming = 0; // how many of them, from the first, the server has been asked to confirm
  bool leased = false;   // a fetch was sent
  uint64_t lease = 0;    // its number, which the server has sent; 0: none yet

  bool waits() const { return fetches > 0 || confirming > 0; }
  void release(FetchedRange &slot) {
    slot.state = FetchedRange::free;
    --fetches;
  }
};

struct ServerConnection {
  uint32_t worldRank = 0;
  std::optional<uint32_t> peer;
  bool ready = false; // the server has welcomed this process
  Clock::time_point retryAt{}, lastSeen{}, pinged{};
  // The process of the last attempt to connect; the next attempt follows after `pause`.
  ServerAddress process;
  Clock::time_point attempted{};
  std::chrono::milliseconds pause{};
  std::string problem; // why it is not ready
  ServerReads reads;
};

class ServerConnections {
public:
  /// Learns what happens to connections.
  class Listener {
  public:
    virtual void welcomed(ServerConnection &connection) = 0; // it is ready
    virtual void arrived(ServerConnection &connection, const MessengerEvent &frame) = 0;
    virtual void received(ServerConnection &connection, const MessengerEvent &data) = 0;
    virtual void ended(ServerConnection &connection) = 0; // also if it will be made again

  protected:
    ~Listener() = default;
  };

  /// The longest lookup in the store; during a transfer, which it delays, it is short.
  static constexpr std::chrono::milliseconds kLongLookup{2000}, kShortLookup{100};

  ServerConnections(std::unique_ptr<Messenger> messenger, const PullerOptions &options, Listener &listener)
      : messenger_(std::move(messenger)), options_(options), listener_(listener) {}

  /// When the call ends with an error.
  void setDeadline(const Deadline &deadline) { deadline_ = deadline; }
  const Deadline &deadline() const { return deadline_; }
  Messenger &messenger() { return *messenger_; }

  /// The connection to a rank, made or not.
  ServerConnection &to(uint32_t worldRank);
  ServerConnection &coordinator() { return to(options_.fleet.sources()[0]); }
  bool isCoordinator(const ServerConnection &connection) const {
    return connection.worldRank == options_.fleet.sources()[0];
  }
  /// All of them, by world rank.
  std::map<uint32_t, ServerConnection> &all() { return connections_; }

  /// Connects if need be. Returns whether the connection is ready.
  bool ready(ServerConnection &connection, std::chrono::milliseconds longestLookup);
  /// Connects again, if it is time, to the process of the last attempt, without a lookup.
  void retry(ServerConnection &connection);
  void disconnect(ServerConnection &connection);
  void send(ServerConnection &connection, const Frame &frame, std::string_view text = {});
  void ping(ServerConnection &connection);
  bool handleEvents();
  /// Pauses between two polls; `any`: the last one has found something to do.
  void wait(bool any);
  /// Every server has the full time to answer from now on.
  void restartSilence();
  /// Why a rank does not answer, for error texts.
  std::string problemOf(const ServerConnection &connection) const;

private:
  /// Whether it is time for an attempt to connect. Ends the last attempt if the process has not answered it.
  bool isDue(ServerConnection &connection);
  /// Begins to connect, unless the last attempt to connect to the same process was just now.
  void connect(ServerConnection &connection, const ServerAddress &process);
  void handle(ServerConnection &connection, const MessengerEvent &event);

  const std::unique_ptr<Messenger> messenger_;
  const PullerOptions &options_;
  Listener &listener_;
  std::map<uint32_t, ServerConnection> connections_;
  std::map<uint32_t, ServerConnection *> byPeer_;
  Backoff sleep_;
  Clock::time_point polled_{};
  Deadline deadline_;
};

} // namespace reshard::pull
