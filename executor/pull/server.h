// SPDX-License-Identifier: Apache-2.0
// Serves the memory of a rank to other processes, on a thread of its own. On the source's mesh rank 0 it is also the
// coordinator. The thread waits for no peer.
#pragma once

#include "executor/digests/element_sums.h"
#include "executor/pull/range_server.h"

#include <condition_variable>
#include <mutex>
#include <thread>

namespace reshard::pull {

using Clock = std::chrono::steady_clock;

/// A thread that works under a lock, piece by piece, and yields the lock to other threads between two pieces.
class ServiceThread {
public:
  /// `work` returns whether there was any; `idle`, which may be empty, is called without the lock about every 100 ms.
  void start(std::function<bool()> work, std::function<void()> idle);
  void stop();
  std::unique_lock<std::mutex> locked();
  /// Waits until something is done after a piece of work. Returns whether it is, when the time is over.
  template <class Done> bool wait(std::unique_lock<std::mutex> &lock, std::chrono::milliseconds longest, Done done) {
    return worked_.wait_for(lock, longest, done);
  }

private:
  void loop(const std::function<bool()> &work, const std::function<void()> &idle);

  std::mutex mutex_;
  std::condition_variable worked_;
  std::atomic<bool> contended_{false}; // another thread waits for mutex_
  std::thread thread_;
  bool stop_ = false;
};

/// The connections that a source rank has opened to the coordinator, or the coordinator to source ranks that do not
/// know it yet.
class SourceLinks {
public:
  SourceLinks(Messenger &messenger, Clients &clients, const ServerOptions &options)
      : messenger_(messenger), clients_(clients), options_(options) {}
  void add(const ServerAddress &process);
  /// The source rank with this token has connected to the coordinator.
  void remove(uint64_t token);
  bool has(uint32_t peer) const;
  void ended(uint32_t peer);
  /// Connects what is not connected. A source rank tells the coordinator its version (0: none), if it has changed.
  void maintain(uint64_t version);

private:
  struct Link {
    ServerAddress to;
    std::optional<uint32_t> peer;
    Clock::time_point retryAt{};
    std::chrono::milliseconds pause{};
    std::optional<uint64_t> lastSent; // the version that the coordinator knows
  };
  void connect(Link &link);

  Messenger &messenger_;
  Clients &clients_;
  const ServerOptions &options_;
  std::vector<Link> links_;
};

/// Hands the frames of other ranks to the coordinator, and sends its answers.
class CoordinatorServer {
public:
  CoordinatorServer(Clients &clients, SourceLinks &links, const ServerOptions &options);

  void seen(const Client &client) { coordinator_.seen(client.number, Clock::now()); }
  void lost(const Client &client);
  void expire(Clock::time_point now) { coordinator_.expire(now); }
  /// The version of this rank; 0: none.
  void publish(uint64_t version);
  void handle(uint32_t peer, const Client &client, const Frame &frame);
  void sendAnswers();

private:
  void sendList(uint32_t peer);

  Clients &clients_;
  SourceLinks &links_;
  const ServerOptions &options_;
  Coordinator coordinator_;
  uint64_t published_ = 0;                     // the version of this rank that coordinator_ knows
  std::map<uint32_t, uint64_t> sourceClients_; // by mesh rank of the source
};

class Server {
public:
  /// `table` and `progress` outlive it.
  Server(std::unique_ptr<Messenger> messenger, const MessageTable &table, PullProgress &progress,
         ServerOptions options);
  ~Server() { stop(); }
  void start();
  /// Ends the thread.
  void stop() { thread_.stop(); }

  /// The address by which other processes connect.
  const std::string &address() const { return messenger_->address(); }

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
  bool progressOnce();
  void handleOrDrop(const MessengerEvent &event);
  void handle(const MessengerEvent &event);
  void handleFrame(uint32_t peer, const MessengerEvent &event);
  void handshake(uint32_t peer, const Frame &frame);
  void sendDigests(uint32_t peer, const MessengerEvent &event);
  Status change(std::unique_lock<std::mutex> &lock, const Version &version);

  const std::unique_ptr<Messenger> messenger_;
  const ServerOptions options_;
  ServiceThread thread_;
  uint64_t last_ = 0;                  // on a source: the last version that was published
  std::vector<CountedDigest> digests_; // the partial digests of the version `last_`
  std::optional<Version> change_;      // the thread shall end all leases and serve this version
  Clients clients_;
  RangeServer ranges_;
  SourceLinks links_;
  std::optional<CoordinatorServer> coordinator_;
  Clock::time_point maintained_{};
};

} // namespace reshard::pull
