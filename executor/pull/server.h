// SPDX-License-Identifier: Apache-2.0
// Serves the memory of a rank to other processes, on a thread of its own. On the source's mesh rank 0 it is also the
// coordinator. The thread waits for no peer.
//
// A version is served as long as nothing changes the memory. A client whose lease is valid when it asks for a
// confirmation has read bytes of that version only. So before the memory changes, all leases end.
#pragma once

#include "executor/digests/element_sums.h"
#include "executor/pull/directory.h"
#include "executor/pull/frames.h"
#include "executor/pull/message_table.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace reshard::pull {

struct ServerOptions {
  Fleet fleet;
  uint32_t worldRank = 0;
  uint64_t token = 0;
  std::function<void()> idle; // called by the thread about every 100 ms
};

class Server {
public:
  /// `table` and `progress` outlive it.
  Server(std::unique_ptr<Messenger> messenger, const MessageTable &table, PullProgress &progress,
         ServerOptions options);
  ~Server() { stop(); }
  void start();
  /// Ends the thread.
  void stop();

  /// The address by which other processes connect.
  const std::string &address() const { return address_; }

  // One other thread may call these.
  /// On a source rank: connects to the coordinator. On the coordinator: connects to a source rank and sends it the
  /// coordinator's address.
  void addPeer(const ServerAddress &process);
  /// On a source rank. Fails, with kind `invalid`, if a version is published or was published before.
  Status mayPublish(uint64_t version);
  /// `digests`: the partial digests of this rank, by bucket; empty: pulls of the version cannot be checked.
  Status publish(uint64_t version, std::vector<CountedDigest> digests = {});
  Status release(const Deadline &deadline);
  /// The number of clients that read the served version.
  size_t leases();
  /// On a target rank: serves the bytes of a version that have arrived; none yet if it is another version than before.
  /// When it returns without an error, no process reads an earlier version out of this one.
  Status serve(const Version &version);
  /// Whether a pull is running, whose bytes clients may wait for.
  void setPulling(bool pulling);

private:
  using Clock = std::chrono::steady_clock;
  struct Fetch {
    Version version;
    uint64_t message = 0, begin = 0, end = 0;
    uint32_t slot = 0;
    bool readable = false; // the client reads this process's memory
  };
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
  struct Client {
    uint64_t number = 0; // unlike the number of its connection, never used again
    uint32_t worldRank = 0;
    uint64_t lease = 0;      // 0: none; else leases_
    Clock::time_point since; // when the lease began
    std::array<Slot, kWindow> slots;
  };
  /// A connection that this process has opened: from a source rank to the coordinator, or from the coordinator to a
  /// source rank that does not know it yet.
  struct Link {
    ServerAddress to;
    std::optional<uint32_t> peer;
    Clock::time_point retryAt{};
    std::chrono::milliseconds pause{};
    std::optional<uint64_t> lastSent; // the version that the coordinator knows
  };

  std::unique_lock<std::mutex> locked();
  void loop();
  bool progressOnce();
  void handleOrDrop(const MessengerEvent &event);
  void handle(const MessengerEvent &event);
  void handleFrame(uint32_t peer, const MessengerEvent &event);
  void handshake(uint32_t peer, const Frame &frame);
  bool handleReader(uint32_t peer, Client &client, const Frame &frame);
  bool handleMember(uint32_t peer, Client &client, const Frame &frame);
  void sendDigests(uint32_t peer, const MessengerEvent &event);
  void forget(uint32_t peer);

  void fetch(uint32_t peer, Client &client, const Fetch &fetch);
  enum class Readiness { ready, later, never };
  Readiness readiness(const Client &client, const Fetch &fetch, const ServedMessage &served) const;
  static bool allocate(Slot &slot);
  void answer(uint32_t peer, Client &client, const Fetch &fetch, const ServedMessage &served);
  void reply(uint32_t peer, FrameKind kind, const Fetch &fetch);
  bool send(uint32_t peer, const Frame &frame, std::string_view text = {});
  void serveParked();
  Status change(std::unique_lock<std::mutex> &lock, const Version &version);
  void endLeases();

  bool isSource() const { return !options_.fleet.isTarget(options_.worldRank); }
  bool coordinates() const { return options_.worldRank == options_.fleet.sources()[0]; }
  uint64_t available() const { return withdrawing_ ? 0 : version_.number; }
  void linkTo(const ServerAddress &process);
  void maintainLinks();
  void connect(Link &link);
  void sendAnswers();
  void sendList(uint32_t peer);
  std::string leaseHolders() const;

  std::unique_ptr<Messenger> messenger_;
  const MessageTable &table_;
  PullProgress &progress_;
  const ServerOptions options_;
  const std::string address_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> contended_{false}; // another thread waits for mutex_
  std::thread thread_;
  bool stop_ = false;
  const uint64_t incarnation_;         // the time at which this process began to serve
  Version version_;                    // the version that is served; a source rank leaves its incarnation 0
  uint64_t last_ = 0;                  // on a source: the last version that was published
  std::vector<CountedDigest> digests_; // the partial digests of the version `last_`
  bool withdrawing_ = false;           // release() waits: no new leases
  std::optional<Version> change_;      // the thread shall end all leases and serve this version
  uint64_t leases_ = 1;                // another one after each change
  bool pulling_ = false;

  std::map<uint32_t, Client> clients_; // by connection
  std::map<uint64_t, uint32_t> byNumber_;
  uint64_t numbers_ = 0;
  std::vector<Link> links_;
  std::optional<Coordinator> coordinator_;
  uint64_t lastSent_ = 0;                      // the version of this rank that coordinator_ knows
  std::map<uint32_t, uint64_t> sourceClients_; // by mesh rank of the source
  Clock::time_point maintained_{};
};

} // namespace reshard::pull
