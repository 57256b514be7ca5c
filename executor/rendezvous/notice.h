// SPDX-License-Identifier: Apache-2.0
// How rank 0 tells the others why it serves no store. If another program has the port, the others connect to that. So
// they also ask by datagrams (UDP) at the number of that port, and rank 0 answers there before it ends.
#pragma once

#include "executor/rendezvous/tcp_server.h"

#include <optional>
#include <string>
#include <vector>

namespace reshard {

/// Answers until `others` processes have asked, or until the deadline. It gives up if the port is not free for
/// datagrams either.
void giveNotice(const TcpStoreConfig &config, const std::string &reason, size_t others, const Deadline &deadline);

/// A process that waits for the store asks by it whether rank 0 has failed.
class NoticeQuestion {
public:
  /// Where no datagrams can be sent, it asks nobody.
  explicit NoticeQuestion(const TcpStoreConfig &config);

  /// Asks at these addresses and on this machine, where rank 0 may run although the address is wrong.
  void ask(const std::vector<SocketAddress> &addresses);
  void askAgain();
  /// To be polled for an answer; -1: there is none.
  int descriptor() const { return socket_.number(); }
  /// Why rank 0 serves no store, once an answer has arrived. With a secret, it has proven that.
  const std::optional<std::string> &answer();

private:
  const TcpStoreConfig config_;
  const std::string challenge_;
  Socket socket_;
  std::vector<SocketAddress> addresses_;
  std::optional<std::string> answer_;
};

} // namespace reshard
