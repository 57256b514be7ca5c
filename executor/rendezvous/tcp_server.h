// SPDX-License-Identifier: Apache-2.0
// The server of a store: one thread in the process of rank 0. It keeps all values in memory and ends with the last
// store that uses it.
#pragma once

#include "executor/rendezvous/address.h"
#include "executor/rendezvous/peer_users.h"
#include "executor/rendezvous/served_client.h"

#include <list>
#include <memory>
#include <mutex>
#include <thread>

namespace reshard {

/// A store over TCP, as all its processes know it.
struct TcpStoreConfig {
  HostPort where; // port 0, for a server: any free port
  Authenticator authenticator;
  /// Without a secret: other machines and other users take part, too.
  bool insecure = false;

  /// Fails if other machines can reach the store, but nothing keeps strangers out.
  Status check(const Deadline &deadline) const;
};

struct TcpLimits {
  std::chrono::milliseconds handshake{5000};
  size_t maxClients = 8192;
  /// Connections whose handshake is not complete. A new one replaces the oldest, first one that has said nothing: a
  /// client of the job sends its handshake as soon as it is connected.
  size_t maxStrangers = 128;
  size_t maxBytes = size_t{512} << 20;
};

class TcpServer {
public:
  static Result<std::shared_ptr<TcpServer>> serve(TcpStoreConfig config, const TcpLimits &limits,
                                                  const Deadline &deadline);
  /// The server that this process has at this address, or a new one: several executors of one process share it.
  static Result<std::shared_ptr<TcpServer>> shared(const TcpStoreConfig &config, const Deadline &deadline);
  ~TcpServer();

  uint16_t port() const { return nameOf(listener_.number()).port(); }

private:
  using Clock = std::chrono::steady_clock;
  struct Client;

  TcpServer(TcpStoreConfig config, const TcpLimits &limits, Socket listener, Socket wake,
            std::optional<PeerUsers> users);
  void loop();
  int wait();
  void accept();
  void add(Socket socket);
  bool makeRoom();
  std::optional<tcp::Verdict> decide(int socket, bool full);
  /// Each returns whether the connection stays open.
  bool serve(Client &client);
  bool read(Client &client);
  bool write(Client &client);

  const TcpStoreConfig config_;
  const TcpLimits limits_;
  const Socket listener_, wake_;
  std::optional<PeerUsers> users_; // if only this process's user is served
  StoreContents contents_;
  std::list<Client> strangers_, members_; // members have completed the handshake; in order of arrival
  Clock::time_point acceptAgain_{};       // after this process had no free file descriptor
  std::thread thread_;
};

} // namespace reshard
