// SPDX-License-Identifier: Apache-2.0
// TCP addresses: names, and listening.
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <cstdint>
#include <string>
#include <sys/socket.h>
#include <vector>

namespace reshard {

struct HostPort {
  std::string host; // a name or an address; an IPv6 address without brackets
  uint16_t port = 0;

  /// As in a URL: "host:port", "[address]:port".
  std::string text() const;
};

/// Reads "host:port" or "[address]:port".
Result<HostPort> hostPort(const std::string &text);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&storage); }
  bool loopback() const;
  uint16_t port() const;
  std::string text() const; // without the port
};

/// The addresses of a host; 1 or more. A name is looked up on a thread, which is left behind if the deadline passes.
Result<std::vector<SocketAddress>> resolve(const HostPort &where, const Deadline &deadline);

/// A file descriptor that is closed with it.
class Socket {
public:
  Socket() = default;
  explicit Socket(int number) : number_(number) {}
  Socket(Socket &&other) noexcept : number_(other.number_) { other.number_ = -1; }
  Socket &operator=(Socket &&other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Socket();
  int number() const { return number_; }
  bool open() const { return number_ >= 0; }

private:
  int number_ = -1;
};

/// A socket that listens. `anyInterface`: a name, other than localhost, stands for all addresses of this machine, since
/// it may have another address here than on other machines; a numeric address always stands for itself.
Result<Socket> listenAt(const HostPort &where, bool anyInterface, const Deadline &deadline);

/// Sets the options of a TCP connection: requests are sent at once, and the connection ends within half a minute after
/// the other machine has lost its power, also while bytes wait for its confirmation.
void prepareConnection(int socket);

/// The address of the other end, or of this end.
SocketAddress peerOf(int socket);
SocketAddress nameOf(int socket);

} // namespace reshard
