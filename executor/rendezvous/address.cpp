// SPDX-License-Identifier: Apache-2.0
// Wraps getaddrinfo and the socket calls. Names are resolved on a thread, because getaddrinfo has no deadline.
#include "executor/rendezvous/address.h"

#include <arpa/inet.h>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <future>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <thread>
#include <unistd.h>

namespace reshard {

namespace {

using Addresses = std::vector<SocketAddress>;

Result<Addresses> lookUp(const HostPort &where, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int error = getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (error != 0)
    return failed("cannot find the host '" + where.host +
                  "': " + (error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo *)> owned(found, freeaddrinfo);
  Addresses addresses;
  for (const addrinfo *each = found; each; each = each->ai_next) {
    SocketAddress &address = addresses.emplace_back();
    std::memcpy(&address.storage, each->ai_addr, each->ai_addrlen);
    address.bytes = each->ai_addrlen;
  }
  return addresses;
}

/// Addresses that need no look-up: numbers, and localhost.
Addresses numeric(const HostPort &where) {
  const HostPort loopback{where.host == "localhost" ? "127.0.0.1" : where.host, where.port};
  Result<Addresses> found = lookUp(loopback, AI_NUMERICHOST | AI_NUMERICSERV);
  return found.ok() ? *found : Addresses();
}

} // namespace

std::string HostPort::text() const {
  const bool brackets = host.find(':') != std::string::npos;
  return (brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Result<HostPort> hostPort(const std::string &text) {
  const size_t colon = text.rfind(':');
  const bool brackets = text.starts_with('[') && colon != std::string::npos && colon > 0 && text[colon - 1] == ']';
  HostPort result;
  if (colon != std::string::npos)
    result.host = brackets ? text.substr(1, colon - 2) : text.substr(0, colon);
  const char *const begin = text.data() + (colon == std::string::npos ? text.size() : colon + 1);
  const char *const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(begin, end, result.port);
  if (result.host.empty() || begin == end || last != end || error != std::errc() || result.port == 0 ||
      (!brackets && result.host.find(':') != std::string::npos) || result.host.find('/') != std::string::npos)
    return invalid("found '" + text + "', expected host:port or [IPv6 address]:port with a port of 1 to 65535");
  return result;
}

bool SocketAddress::loopback() const {
  if (storage.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in &>(storage).sin_addr.s_addr) >> 24 == 127;
  if (storage.ss_family != AF_INET6)
    return false;
  const auto &ip = reinterpret_cast<const sockaddr_in6 &>(storage).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&ip) || (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr[12] == 127);
}

uint16_t SocketAddress::port() const {
  return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6 &>(storage).sin6_port
                                             : reinterpret_cast<const sockaddr_in &>(storage).sin_port);
}

std::string SocketAddress::text() const {
  char host[NI_MAXHOST] = "?";
  getnameinfo(get(), bytes, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

Result<std::vector<SocketAddress>> resolve(const HostPort &where, const Deadline &deadline) {
  if (Addresses found = numeric(where); !found.empty())
    return found;
  auto answer = std::make_shared<std::promise<Result<Addresses>>>();
  std::future<Result<Addresses>> found = answer->get_future();
  std::thread([where, answer] { answer->set_value(lookUp(where, 0)); }).detach();
  if (deadline && found.wait_until(*deadline) != std::future_status::ready)
    return timedOut("timed out looking up the host '" + where.host + "'");
  return found.get();
}

Socket::~Socket() {
  if (number_ >= 0)
    ::close(number_);
}

Result<Socket> listenAt(const HostPort &where, bool anyInterface, const Deadline &deadline) {
  Addresses addresses = numeric(where);
  if (addresses.empty() && anyInterface)
    for (const char *any : {"::", "0.0.0.0"}) // the first is both, unless this machine has no IPv6
      for (const SocketAddress &address : numeric({any, where.port}))
        addresses.push_back(address);
  if (addresses.empty()) {
    Result<Addresses> found = resolve(where, deadline);
    if (!found.ok())
      return found.status();
    addresses = std::move(*found);
  }
  int error = 0;
  for (const SocketAddress &address : addresses) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1, off = 0;
    setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address.storage.ss_family == AF_INET6)
      setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (socket.open() && ::bind(socket.number(), address.get(), address.bytes) == 0 &&
        ::listen(socket.number(), SOMAXCONN) == 0)
      return socket;
    error = errno;
    if (error == EADDRINUSE)
      break;
  }
  std::string reason = std::string(std::strerror(error));
  if (error == EADDRINUSE)
    reason = "another process uses the port; choose another port, or end that process";
  if (error == EADDRNOTAVAIL)
    reason = "it is no address of this machine, on which rank 0 runs; give the address of rank 0's machine";
  return failed("rank 0 cannot serve the store at " + where.text() + ": " + reason);
}

void prepareConnection(int socket) {
  // The kernel asks the other machine. It does not ask while sent bytes are not confirmed; TCP_USER_TIMEOUT limits
  // that.
  const int on = 1, idle = 10, interval = 5, count = 3, milliseconds = 25'000;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

SocketAddress peerOf(int socket) {
  SocketAddress address;
  address.bytes = sizeof address.storage;
  if (getpeername(socket, reinterpret_cast<sockaddr *>(&address.storage), &address.bytes) != 0)
    return {};
  return address;
}

SocketAddress nameOf(int socket) {
  SocketAddress address;
  address.bytes = sizeof address.storage;
  if (getsockname(socket, reinterpret_cast<sockaddr *>(&address.storage), &address.bytes) != 0)
    return {};
  return address;
}

} // namespace reshard
