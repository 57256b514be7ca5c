// SPDX-License-Identifier: Apache-2.0
// The users of the processes at the other ends of TCP connections inside this machine.
#pragma once

#include "executor/rendezvous/address.h"

#include <array>
#include <optional>
#include <sys/types.h>

namespace reshard {

/// One thread uses it. It opens its descriptors once, so that a process that has no more is not taken for a stranger.
class PeerUsers {
public:
  /// How the kernel is asked: for one connection (NETLINK_SOCK_DIAG), or by reading its table of all connections, which
  /// takes longer the more there are.
  enum class Source { connection, table };

  /// Uses Source::connection if the kernel answers it, which a sandbox may forbid. `listener`: a socket of this process
  /// that listens at a loopback address; the kernel is asked for it first.
  static Result<PeerUsers> open(int listener);
  static Result<PeerUsers> openAs(Source source);

  /// No value: the other end is no socket of this machine, or it has been closed. The kernel shows a closed one as
  /// root's.
  Result<std::optional<uid_t>> userOf(int socket);

private:
  struct Ends;
  PeerUsers() = default;
  Result<std::optional<uid_t>> ask(const Ends &ends, unsigned state);
  Result<std::optional<uid_t>> search(const Ends &ends);

  Socket netlink_;
  std::array<Socket, 2> tables_; // IPv4 and IPv6
  uint32_t asked_ = 0;
};

} // namespace reshard
