// SPDX-License-Identifier: Apache-2.0
// A client of the server that rank 0 runs.
#pragma once

#include "executor/rendezvous/address.h"
#include "executor/rendezvous/notice.h"
#include "executor/rendezvous/store.h"
#include "executor/rendezvous/tcp_server.h"

#include <memory>

namespace reshard {

/// If the connection was lost, the next call connects again. One thread uses a store at a time.
class TcpStore : public Store {
public:
  /// Connects to the server, and tries again until the deadline while nobody serves. Fails as soon as rank 0 says that
  /// it does not. `server`: this process's server, if it serves the store; kept until the store is destroyed.
  static Result<std::unique_ptr<Store>> connect(const TcpStoreConfig &config, std::shared_ptr<TcpServer> server,
                                                const Deadline &deadline);

  Status set(const std::string &key, std::string_view value, const Deadline &deadline) override;
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) override;

private:
  explicit TcpStore(TcpStoreConfig config) : config_(std::move(config)) {}

  /// Whether an attempt to connect may succeed later.
  enum class Again { no, yes };
  Status attempt(const Deadline &deadline, Again &again);
  Status open(const SocketAddress &address, const Deadline &deadline, Again &again);
  Status handshake(const Deadline &deadline, Again &again);
  Status prove(const std::string &own, const std::string &server, const Deadline &deadline, Again &again);
  Status refusal(tcp::Verdict verdict) const;
  Status send(std::string_view bytes, const Deadline &deadline);
  Result<std::string> receive(size_t count, const Deadline &deadline);
  Status ready(short events, const Deadline &deadline);
  /// Returns the answer to a request. After an error the connection is closed, since a late answer would be taken for
  /// that to the next request.
  Result<std::string> ask(tcp::StoreCommand command, const std::string &key, std::string_view value,
                          const Deadline &deadline);
  /// Sends a request and receives its answer. Connects again, once, if the connection is closed or fails: to repeat a
  /// request changes nothing. It does not wait for a server, so a caller learns at once that rank 0 has ended.
  Result<std::string> exchangeOrReconnect(const std::string &request, const Deadline &deadline);
  Result<std::string> exchange(const std::string &request, const Deadline &deadline);
  std::string name() const { return "the store at " + config_.where.text(); }

  const TcpStoreConfig config_;
  std::shared_ptr<TcpServer> server_;
  Socket socket_;
  std::optional<NoticeQuestion> question_; // while it connects for the first time
};

} // namespace reshard
