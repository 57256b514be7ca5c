// SPDX-License-Identifier: Apache-2.0
#include "executor/rendezvous/notice.h"

#include "base/random.h"
#include "executor/rendezvous/bytes.h"

#include <algorithm>
#include <cerrno>
#include <netinet/in.h>
#include <poll.h>
#include <set>

namespace reshard {

namespace {

constexpr std::string_view kQuestion = "RESHARDQ", kAnswer = "RESHARDN";
constexpr size_t kMaxNoticeBytes = 1000; // with all else, a datagram that no network divides

std::string proofOf(std::string_view challenge, std::string_view reason) {
  return "reshard notice" + std::string(challenge) + std::string(reason);
}

std::string questionOf(const Authenticator &secret, std::string_view challenge) {
  const std::string proof = secret.mac("reshard notice question" + std::string(challenge));
  return ByteWriter().raw(kQuestion).raw(challenge).text(proof).take();
}

/// A socket for datagrams of both kinds of addresses, if this machine has them.
Socket datagrams(int family) {
  Socket socket(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int off = 0;
  if (family == AF_INET6)
    setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  return socket;
}

SocketAddress mapped(SocketAddress address) {
  if (address.storage.ss_family != AF_INET)
    return address;
  const auto from = reinterpret_cast<const sockaddr_in &>(address.storage);
  auto &to = reinterpret_cast<sockaddr_in6 &>(address.storage);
  to = {};
  to.sin6_family = AF_INET6;
  to.sin6_port = from.sin_port;
  to.sin6_addr.s6_addr[10] = to.sin6_addr.s6_addr[11] = 0xff;
  std::copy_n(reinterpret_cast<const uint8_t *>(&from.sin_addr), 4, to.sin6_addr.s6_addr + 12);
  address.bytes = sizeof to;
  return address;
}

} // namespace

void giveNotice(const TcpStoreConfig &config, const std::string &reason, size_t others, const Deadline &deadline) {
  const std::string text = reason.substr(0, kMaxNoticeBytes);
  Socket socket;
  for (const char *any : {"::", "0.0.0.0"}) {
    const Result<std::vector<SocketAddress>> addresses = resolve({any, config.where.port}, deadline);
    if (!addresses.ok())
      continue;
    const SocketAddress &at = addresses->front();
    if (socket = datagrams(at.storage.ss_family); socket.open() && ::bind(socket.number(), at.get(), at.bytes) == 0)
      break;
    socket = Socket();
  }
  std::set<std::string> notified; // their challenges
  while (socket.open() && notified.size() < others && !passed(deadline)) {
    pollfd polled{socket.number(), POLLIN, 0};
    ::poll(&polled, 1, 20);
    for (int questions = 0; questions < 64; ++questions) {
      char buffer[256];
      SocketAddress from;
      from.bytes = sizeof from.storage;
      const ssize_t bytes = ::recvfrom(socket.number(), buffer, sizeof buffer, 0,
                                       reinterpret_cast<sockaddr *>(&from.storage), &from.bytes);
      if (bytes < 0)
        break;
      const std::string_view question(buffer, static_cast<size_t>(bytes));
      const std::string challenge(question.substr(std::min(kQuestion.size(), question.size()), tcp::kChallengeBytes));
      const bool allowed = from.loopback() || config.authenticator.hasSecret() || config.insecure;
      if (!allowed || challenge.size() != tcp::kChallengeBytes ||
          question != questionOf(config.authenticator, challenge))
        continue;
      const std::string answer = ByteWriter()
                                     .raw(kAnswer)
                                     .raw(challenge)
                                     .text(config.authenticator.mac(proofOf(challenge, text)))
                                     .raw(text)
                                     .take();
      if (::sendto(socket.number(), answer.data(), answer.size(), 0, from.get(), from.bytes) > 0)
        notified.insert(challenge);
    }
  }
}

NoticeQuestion::NoticeQuestion(const TcpStoreConfig &config)
    : config_(config), challenge_(randomBytes(tcp::kChallengeBytes)), socket_(datagrams(AF_INET6)) {
  if (!socket_.open())
    socket_ = datagrams(AF_INET); // a machine without IPv6
}

void NoticeQuestion::ask(const std::vector<SocketAddress> &addresses) {
  addresses_ = addresses;
  if (const Result<std::vector<SocketAddress>> here = resolve({"127.0.0.1", config_.where.port}, {}); here.ok())
    addresses_.push_back(here->front());
  askAgain();
}

void NoticeQuestion::askAgain() {
  if (!socket_.open())
    return;
  const bool both = nameOf(socket_.number()).storage.ss_family == AF_INET6;
  const std::string question = questionOf(config_.authenticator, challenge_);
  for (const SocketAddress &each : addresses_) {
    const SocketAddress to = both ? mapped(each) : each;
    // An error is that of an earlier question: nobody answers there yet.
    [[maybe_unused]] const ssize_t sent =
        ::sendto(socket_.number(), question.data(), question.size(), 0, to.get(), to.bytes);
  }
}

const std::optional<std::string> &NoticeQuestion::answer() {
  for (int datagrams = 0; datagrams < 64 && socket_.open() && !answer_; ++datagrams) {
    char buffer[2048];
    const ssize_t bytes = ::recv(socket_.number(), buffer, sizeof buffer, 0);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      break;
    ByteReader reader({buffer, static_cast<size_t>(std::max<ssize_t>(bytes, 0))});
    const bool ours = reader.raw(kAnswer.size()) == kAnswer && reader.raw(challenge_.size()) == challenge_;
    const std::string_view proof = reader.text();
    const std::string reason(reader.rest());
    const Authenticator &secret = config_.authenticator;
    if (ours && reader.ok() && !reason.empty() &&
        (!secret.hasSecret() || secret.verify(proofOf(challenge_, reason), proof)))
      answer_ = reason;
  }
  return answer_;
}

} // namespace reshard
