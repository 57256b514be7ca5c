// SPDX-License-Identifier: Apache-2.0
// Asks the kernel's diagnosis of sockets (NETLINK_SOCK_DIAG) for the user of a connection, or reads /proc/self/net/tcp
// where that is not permitted.
#include "executor/rendezvous/peer_users.h"

#include "base/hash.h"
#include "base/system_error.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sstream>

namespace reshard {

/// A connection as the process at the other end sees it: its own end is the peer's. An IPv4 address in IPv6 form is an
/// IPv4 address.
struct PeerUsers::Ends {
  struct End {
    std::array<uint32_t, 4> words{}; // as they are in memory
    size_t count = 0;                // 1 or 4 words
    uint16_t port = 0;               // in network order

    explicit End(const SocketAddress &address) {
      const void *from = nullptr;
      if (address.storage.ss_family == AF_INET6) {
        const auto &at = reinterpret_cast<const sockaddr_in6 &>(address.storage);
        const bool mapped = IN6_IS_ADDR_V4MAPPED(&at.sin6_addr);
        count = mapped ? 1 : 4;
        from = at.sin6_addr.s6_addr + (mapped ? 12 : 0);
        port = at.sin6_port;
      } else {
        const auto &at = reinterpret_cast<const sockaddr_in &>(address.storage);
        count = 1;
        from = &at.sin_addr;
        port = at.sin_port;
      }
      std::memcpy(words.data(), from, count * sizeof(uint32_t));
    }
    End() = default;
    /// As the kernel's table shows it.
    std::string text() const {
      std::string text;
      for (size_t word = 0; word < count; ++word)
        text += hexadecimal(words[word], 8);
      text += ":" + hexadecimal(ntohs(port), 4);
      std::transform(text.begin(), text.end(), text.begin(), [](unsigned char each) { return std::toupper(each); });
      return text;
    }
  };
  End own, other;
};

namespace {

/// The states of a connection (include/net/tcp_states.h of Linux).
constexpr unsigned kEstablished = 1, kListens = 10;

} // namespace

Result<PeerUsers> PeerUsers::open(int listener) {
  Result<PeerUsers> users = openAs(Source::connection);
  if (users.ok()) {
    Ends ends;
    ends.own = Ends::End(nameOf(listener));
    ends.other.count = ends.own.count;
    const Result<std::optional<uid_t>> answer = users->ask(ends, kListens);
    if (answer.ok() && *answer)
      return users;
  }
  return openAs(Source::table);
}

Result<PeerUsers> PeerUsers::openAs(Source source) {
  PeerUsers users;
  if (source == Source::connection) {
    users.netlink_ = Socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
    const timeval second{1, 0}; // the kernel answers at once
    if (!users.netlink_.open() ||
        setsockopt(users.netlink_.number(), SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second) != 0)
      return systemError("open", "the kernel's diagnosis of sockets");
    return users;
  }
  users.tables_[0] = Socket(::open("/proc/self/net/tcp", O_RDONLY | O_CLOEXEC));
  if (!users.tables_[0].open())
    return systemError("read", "/proc/self/net/tcp");
  users.tables_[1] = Socket(::open("/proc/self/net/tcp6", O_RDONLY | O_CLOEXEC));
  if (!users.tables_[1].open() && errno != ENOENT) // a kernel without IPv6
    return systemError("read", "/proc/self/net/tcp6");
  return users;
}

Result<std::optional<uid_t>> PeerUsers::userOf(int socket) {
  const SocketAddress peer = peerOf(socket);
  if (!peer.loopback())
    return std::optional<uid_t>();
  const Ends ends{Ends::End(peer), Ends::End(nameOf(socket))};
  return netlink_.open() ? ask(ends, kEstablished) : search(ends);
}

/// Asks for the connection, which must have a state and an inode: a socket without one has been closed by its process.
Result<std::optional<uid_t>> PeerUsers::ask(const Ends &ends, unsigned state) {
  struct {
    nlmsghdr header{};
    inet_diag_req_v2 body{};
  } request;
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.header.nlmsg_seq = ++asked_;
  request.body.sdiag_family = ends.own.count == 1 ? AF_INET : AF_INET6;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = ~0u;
  inet_diag_sockid &id = request.body.id;
  id.idiag_sport = ends.own.port;
  id.idiag_dport = ends.other.port;
  std::memcpy(id.idiag_src, ends.own.words.data(), sizeof id.idiag_src);
  std::memcpy(id.idiag_dst, ends.other.words.data(), sizeof id.idiag_dst);
  std::fill_n(id.idiag_cookie, 2, INET_DIAG_NOCOOKIE);
  if (uninterrupted([&] { return ::send(netlink_.number(), &request, sizeof request, 0); }) < 0)
    return systemError("ask", "the kernel for the user of a connection");
  alignas(nlmsghdr) char buffer[8192];
  for (int stale = 0; stale < 16; ++stale) { // answers to earlier questions
    const ssize_t bytes = uninterrupted([&] { return ::recv(netlink_.number(), buffer, sizeof buffer, 0); });
    if (bytes < 0)
      return systemError("ask", "the kernel for the user of a connection");
    nlmsghdr header{};
    if (static_cast<size_t>(bytes) < sizeof header)
      break;
    std::memcpy(&header, buffer, sizeof header);
    if (header.nlmsg_seq != asked_)
      continue;
    inet_diag_msg found{};
    if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY || static_cast<size_t>(bytes) < NLMSG_LENGTH(sizeof found))
      return std::optional<uid_t>(); // an error: there is no such connection
    std::memcpy(&found, buffer + NLMSG_HDRLEN, sizeof found);
    // In place of a connection that it does not have, the kernel shows a socket that listens at the port.
    const bool same = found.id.idiag_sport == id.idiag_sport && found.id.idiag_dport == id.idiag_dport;
    return same && found.idiag_state == state && found.idiag_inode != 0 ? std::optional<uid_t>(found.idiag_uid)
                                                                        : std::nullopt;
  }
  return failed("the kernel gave no answer for the user of a connection");
}

Result<std::optional<uid_t>> PeerUsers::search(const Ends &ends) {
  const std::string own = ends.own.text(), other = ends.other.text(), mapped = "0000000000000000FFFF0000";
  for (const Socket &table : tables_) {
    if (!table.open())
      continue;
    if (::lseek(table.number(), 0, SEEK_SET) != 0)
      return systemError("read", "/proc/self/net/tcp");
    std::string rest;
    char buffer[1 << 14];
    while (true) {
      const ssize_t bytes = uninterrupted([&] { return ::read(table.number(), buffer, sizeof buffer); });
      if (bytes < 0)
        return systemError("read", "/proc/self/net/tcp");
      if (bytes == 0)
        break;
      rest.append(buffer, static_cast<size_t>(bytes));
      for (size_t end = 0; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1)) {
        std::istringstream words(rest.substr(0, end));
        std::string number, at, to, queues, timer, retransmits, timeout;
        unsigned state = 0;
        uid_t user = 0;
        uint64_t inode = 0;
        words >> number >> at >> to >> std::hex >> state >> queues >> timer >> retransmits >> std::dec >> user >>
            timeout >> inode;
        for (std::string *each : {&at, &to})
          if (each->starts_with(mapped))
            each->erase(0, mapped.size());
        if (words && at == own && to == other)
          return state == kEstablished && inode != 0 ? std::optional(user) : std::nullopt;
      }
    }
  }
  return std::optional<uid_t>();
}

} // namespace reshard
