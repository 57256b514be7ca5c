// SPDX-License-Identifier: Apache-2.0
// Serves ranges of the messages of one version out of a rank's memory.
//
// A version is served as long as nothing changes the memory. A client whose lease is valid when it asks for a
// confirmation has read bytes of that version only. So before the memory changes, all leases end.
#pragma once

#include "executor/pull/fleet.h"
#include "executor/pull/frames.h"
#include "executor/pull/message_table.h"

#include <functional>

namespace reshard::pull {

struct ServerOptions {
  Fleet fleet;
  uint32_t worldRank = 0;
  uint64_t token = 0;
  std::function<void()> idle; // called by the thread about every 100 ms
  /// The time at which this process began to serve.
  uint64_t incarnation =
      static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());

  bool isSource() const { return !fleet.isTarget(worldRank); }
  bool coordinates() const { return worldRank == fleet.sources()[0]; }
};

/// A request of a client.
struct Fetch {
  Version version;
  uint64_t message = 0, begin = 0, end = 0;
  uint32_t slot = 0;
  bool readable = false; // the client reads this process's memory
};

struct Client {
  struct Unmap {
    void operator()(std::byte *memory) const;
  };
  /// A place for a range that a client fetches. Its memory, of kRangeBytes, is mapped: freed memory of the heap would
  /// stay with the process.
  struct Slot {
    std::unique_ptr<std::byte[], Unmap> memory;
    bool sending = false, inPlace = false;
    std::optional<Fetch> parked;
  };
  uint64_t number = 0; // unlike the number of its connection, never used again
  uint32_t worldRank = 0;
  uint64_t lease = 0;                          // 0: none
  std::chrono::steady_clock::time_point since; // when the lease began
  std::array<Slot, kWindow> slots;
};

/// The clients that this process has welcomed, by connection.
class Clients {
public:
  /// Called before a connection is forgotten; `client`: null if it has no client.
  using Ended = std::function<void(uint32_t peer, const Client *client)>;
  Clients(Messenger &messenger, Ended ended) : messenger_(messenger), ended_(std::move(ended)) {}

  std::map<uint32_t, Client> &all() { return clients_; }
  Client *find(uint32_t peer);
  Client &add(uint32_t peer, uint32_t worldRank);
  /// The connection of a client's number.
  std::optional<uint32_t> peerOf(uint64_t number) const;
  /// Returns false after dropping the connection, if the peer does not receive its frames. The peer connects again.
  bool send(uint32_t peer, const Frame &frame, std::string_view text = {});
  /// Closes a connection.
  void drop(uint32_t peer);
  /// A connection is closed.
  void forget(uint32_t peer);

private:
  Messenger &messenger_;
  const Ended ended_;
  std::map<uint32_t, Client> clients_;
  std::map<uint64_t, uint32_t> byNumber_;
  uint64_t numbers_ = 0;
};

class RangeServer {
public:
  /// All outlive it.
  RangeServer(Messenger &messenger, Clients &clients, const MessageTable &table, PullProgress &progress,
              const ServerOptions &options)
      : messenger_(messenger), clients_(clients), table_(table), progress_(progress), options_(options) {}

  /// The version that is served; a source rank leaves its incarnation 0.
  const Version &version() const { return version_; }
  /// The memory of a source has a version.
  void publish(uint64_t version) { version_.number = version; }
  /// The published version; 0: none.
  uint64_t available() const { return withdrawing_ ? 0 : version_.number; }
  /// Ends all leases, and every transfer out of the memory that will change; then serves another version.
  void change(const Version &version);
  /// Whether new leases are refused.
  void setWithdrawing(bool withdrawing) { withdrawing_ = withdrawing; }
  /// Whether a pull is running, whose bytes clients may wait for.
  void setPulling(bool pulling) { pulling_ = pulling; }
  size_t leases() const;
  /// The names of clients with a lease: "replica 2 rank 1 (world rank 7), for 3.2 s".
  std::string leaseHolders() const;

  /// Handles the frames of ranks that read bytes; returns false for other frames.
  bool handle(uint32_t peer, Client &client, const Frame &frame);
  /// The data of a slot are sent.
  void sent(uint32_t peer, Client &client, uint64_t slot);
  /// Answers fetches whose bytes have arrived meanwhile.
  void serveParked();

private:
  enum class Readiness { ready, later, never };
  Readiness readiness(const Client &client, const Fetch &fetch, const ServedMessage &served) const;
  void fetch(uint32_t peer, Client &client, const Fetch &fetch);
  void answer(uint32_t peer, Client &client, const Fetch &fetch, const ServedMessage &served);
  void reply(uint32_t peer, FrameKind kind, const Fetch &fetch);

  Messenger &messenger_;
  Clients &clients_;
  const MessageTable &table_;
  PullProgress &progress_;
  const ServerOptions &options_;
  Version version_;
  bool withdrawing_ = false, pulling_ = false;
  uint64_t leases_ = 1; // the number of new leases: another one after each change
};

} // namespace reshard::pull
