// SPDX-License-Identifier: Apache-2.0
// Connects and proves the secret, repeats that until rank 0 answers, and sends one request at a time. A request on a
// lost connection is repeated once on a new one.
#include "executor/rendezvous/tcp_store.h"

#include "base/random.h"
#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>

namespace reshard {

using tcp::Verdict;

namespace {

/// The time until a deadline for poll(): at least 1 ms, since the answer of a server takes time.
int millisecondsUntil(const Deadline &deadline) {
  const int64_t most = deadline.interrupt ? Interrupt::kPause.count() : 1'000'000'000; // then ask for an interrupt
  if (!deadline)
    return deadline.interrupt ? static_cast<int>(most) : -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 1, most));
}

} // namespace

Result<std::unique_ptr<Store>> TcpStore::connect(const TcpStoreConfig &config, std::shared_ptr<TcpServer> server,
                                                 const Deadline &deadline) {
  if (Status status = config.check(deadline); !status.ok())
    return status;
  std::unique_ptr<TcpStore> store(new TcpStore(config));
  store->server_ = std::move(server);
  if (!store->server_)
    store->question_.emplace(config);
  Polling polling(std::chrono::milliseconds(200));
  while (true) {
    Again again = Again::no;
    Status status = store->attempt(deadline, again);
    if (status.ok()) {
      store->question_.reset();
      return std::unique_ptr<Store>(std::move(store));
    }
    if (again == Again::no)
      return status;
    if (const std::optional<std::string> reason = store->question_ ? store->question_->answer() : std::nullopt)
      return failed(*reason);
    if (!polling.wait(deadline))
      return timedOut("timed out: " + status.message() +
                      "; rank 0 of the job serves it: if it has ended, its own error is the cause");
  }
}

Status TcpStore::attempt(const Deadline &deadline, Again &again) {
  const Result<std::vector<SocketAddress>> addresses = resolve(config_.where, deadline);
  if (!addresses.ok())
    return addresses.status();
  if (question_)
    question_->ask(*addresses);
  Status status;
  for (const SocketAddress &address : *addresses) {
    again = Again::no;
    status = open(address, deadline, again);
    if (status.ok())
      break;
  }
  if (status.ok())
    status = handshake(deadline, again);
  if (!status.ok())
    socket_ = Socket();
  return status;
}

Status TcpStore::open(const SocketAddress &address, const Deadline &deadline, Again &again) {
  socket_ = Socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  if (!socket_.open() || ::connect(socket_.number(), address.get(), address.bytes) != 0)
    error = errno;
  if (error == EINPROGRESS) {
    if (Status status = ready(POLLOUT, deadline); !status.ok())
      return status;
    socklen_t bytes = sizeof error;
    getsockopt(socket_.number(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  if (error == 0) {
    prepareConnection(socket_.number());
    return {};
  }
  for (const int passing : {ECONNREFUSED, ECONNRESET, ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, EAGAIN, EINTR})
    if (error == passing) // rank 0 may start later, or its machine may come back
      again = Again::yes;
  return failed("cannot connect to " + name() + ": " + std::strerror(error));
}

Status TcpStore::handshake(const Deadline &deadline, Again &again) {
  const std::string challenge = randomBytes(tcp::kChallengeBytes);
  const std::string message = ByteWriter()
                                  .raw(tcp::kMagic)
                                  .number(tcp::kVersion)
                                  .number(static_cast<uint8_t>(config_.authenticator.hasSecret()))
                                  .raw(challenge)
                                  .take();
  Status status = send(message, deadline);
  Result<std::string> answer = status.ok() ? receive(tcp::kHandshakeBytes, deadline) : Result<std::string>(status);
  if (!answer.ok()) {
    if (!answer.status().timedOut()) // it ended: that of an earlier attempt, for example
      again = Again::yes;
    return answer.status();
  }
  ByteReader reader(*answer);
  if (reader.raw(tcp::kMagic.size()) != tcp::kMagic)
    return failed(config_.where.text() +
                  " is served by another program, expected rank 0 of this job; choose another port");
  if (const uint32_t version = reader.number<uint32_t>(); version != tcp::kVersion)
    return failed(name() + " has version " + std::to_string(version) + " of the protocol, expected " +
                  std::to_string(tcp::kVersion) + "; use the same release of reshard in all processes");
  const auto verdict = static_cast<Verdict>(reader.number<uint8_t>());
  if (verdict != Verdict::accepted)
    return refusal(verdict);
  return config_.authenticator.hasSecret() ? prove(challenge, std::string(reader.rest()), deadline, again) : Status();
}

Status TcpStore::prove(const std::string &own, const std::string &server, const Deadline &deadline, Again &again) {
  Status status = send(config_.authenticator.mac(tcp::clientProof(own, server)), deadline);
  const Result<std::string> answer = status.ok() ? receive(1 + kMacBytes, deadline) : Result<std::string>(status);
  if (!answer.ok()) {
    if (!answer.status().timedOut()) // it made room for others, for example
      again = Again::yes;
    return answer.status();
  }
  const auto verdict = static_cast<Verdict>(ByteReader(*answer).number<uint8_t>());
  if (verdict != Verdict::accepted)
    return refusal(verdict);
  if (!config_.authenticator.verify(tcp::serverProof(own, server), std::string_view(*answer).substr(1)))
    return failed(name() + " could not prove that it has the secret of this job");
  return {};
}

Status TcpStore::refusal(Verdict verdict) const {
  switch (verdict) {
  case Verdict::secretExpected:
    return failed(name() + " expects a secret, and this process has none: give all processes the same secret "
                           "(RESHARD_SECRET)");
  case Verdict::secretRefused:
    return failed(name() + " has no secret, and this process has one: give all processes the same secret "
                           "(RESHARD_SECRET), rank 0 too");
  case Verdict::otherSecret:
    return failed(name() + " has another secret: give all processes the same secret (RESHARD_SECRET)");
  case Verdict::otherUser:
    return failed(name() + " refused this process: without a secret it serves only processes of rank 0's user on rank "
                           "0's machine. Give all processes the same secret (RESHARD_SECRET), or trust the network "
                           "with 'insecure' (--insecure)");
  case Verdict::full:
    return failed(name() + " has no room for another client: rank 0's process needs a higher limit of open files "
                           "(ulimit -n) for a job of this size");
  default:
    return failed(name() + " refused this process for reason " + std::to_string(static_cast<int>(verdict)) +
                  ", which this release of reshard does not know");
  }
}

Status TcpStore::ready(short events, const Deadline &deadline) {
  constexpr int kAskAgain = 200;
  while (true) {
    pollfd polled[2] = {{socket_.number(), events, 0}, {question_ ? question_->descriptor() : -1, POLLIN, 0}};
    const int left = millisecondsUntil(deadline);
    const int count = ::poll(polled, 2, question_ && (left < 0 || left > kAskAgain) ? kAskAgain : left);
    if (count < 0 && errno != EINTR)
      return failed("cannot wait for " + name() + ": " + std::strerror(errno));
    if (count > 0 && polled[0].revents)
      return {};
    if (const std::optional<std::string> reason = question_ ? question_->answer() : std::nullopt)
      return failed(*reason);
    if (passed(deadline))
      return timedOut("timed out waiting for " + name());
    if (count == 0 && question_)
      question_->askAgain();
  }
}

Status TcpStore::send(std::string_view bytes, const Deadline &deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0)
      bytes.remove_prefix(static_cast<size_t>(sent));
    else if (sent < 0 && errno == EAGAIN) {
      if (Status status = ready(POLLOUT, deadline); !status.ok())
        return status;
    } else if (sent < 0 && errno != EINTR)
      return failed("lost " + name() + ": " + std::strerror(errno) + "; rank 0 may have ended");
  }
  return {};
}

Result<std::string> TcpStore::receive(size_t count, const Deadline &deadline) {
  std::string bytes(count, '\0');
  for (size_t at = 0; at < count;) {
    const ssize_t received = ::recv(socket_.number(), bytes.data() + at, count - at, 0);
    if (received > 0)
      at += static_cast<size_t>(received);
    else if (received < 0 && errno == EAGAIN) {
      if (Status status = ready(POLLIN, deadline); !status.ok())
        return status;
    } else if (received == 0 || errno != EINTR)
      return failed("lost " + name() + ": " + (received == 0 ? "it closed the connection" : std::strerror(errno)) +
                    "; rank 0 may have ended");
  }
  return bytes;
}

Result<std::string> TcpStore::exchange(const std::string &request, const Deadline &deadline) {
  if (Status status = send(request, deadline); !status.ok())
    return status;
  const Result<std::string> header = receive(sizeof(uint32_t), deadline);
  if (!header.ok())
    return header.status();
  const uint32_t length = ByteReader(*header).number<uint32_t>();
  if (length < 1 || length > 1 + kMaxValueBytes)
    return failed(name() + " gave an answer of " + std::to_string(length) + " bytes, expected 1 to " +
                  std::to_string(1 + kMaxValueBytes));
  return receive(length, deadline);
}

Result<std::string> TcpStore::exchangeOrReconnect(const std::string &request, const Deadline &deadline) {
  Status lost = failed("lost " + name() + ": an earlier request failed; rank 0 may have ended");
  if (socket_.open()) {
    Result<std::string> answer = exchange(request, deadline);
    if (answer.ok() || answer.status().timedOut())
      return answer;
    lost = answer.status();
    socket_ = Socket();
  }
  Again again = Again::no;
  if (Status status = attempt(deadline, again); !status.ok())
    return status.timedOut() ? status : std::move(lost).withSuffix("; " + status.message());
  return exchange(request, deadline);
}

Result<std::string> TcpStore::ask(tcp::StoreCommand command, const std::string &key, std::string_view value,
                                  const Deadline &deadline) {
  std::string body = ByteWriter().number(static_cast<uint8_t>(command)).text(key).raw(value).take();
  if (key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes)
    return failed(name() + " keeps keys of " + std::to_string(kMaxKeyBytes) + " and values of " +
                  std::to_string(kMaxValueBytes) + " bytes at most, found " + std::to_string(key.size()) + " and " +
                  std::to_string(value.size()));
  Result<std::string> answer = exchangeOrReconnect(ByteWriter().text(body).take(), deadline);
  if (!answer.ok())
    socket_ = Socket();
  return answer;
}

Status TcpStore::set(const std::string &key, std::string_view value, const Deadline &deadline) {
  const Result<std::string> answer = ask(tcp::StoreCommand::set, key, value, deadline);
  if (!answer.ok())
    return answer.status();
  const auto code = static_cast<tcp::Answer>(answer->front());
  if (code == tcp::Answer::full)
    return failed(name() + " has no room for " + std::to_string(value.size()) + " more bytes");
  return code == tcp::Answer::done ? Status() : failed(name() + " did not accept a value");
}

Result<std::optional<std::string>> TcpStore::find(const std::string &key, const Deadline &deadline) {
  Result<std::string> answer = ask(tcp::StoreCommand::find, key, {}, deadline);
  if (!answer.ok())
    return answer.status();
  const auto code = static_cast<tcp::Answer>(answer->front());
  if (code == tcp::Answer::notSet)
    return std::optional<std::string>();
  if (code != tcp::Answer::done)
    return failed(name() + " could not read the key '" + key + "'");
  return std::optional<std::string>(answer->substr(1));
}

} // namespace reshard
