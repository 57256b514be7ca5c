// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/tcp_server.h"

#include "support/system_error.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace reshard {

struct TcpServer::Client {
  Client(Socket socket, StoreContents &contents, const Authenticator &authenticator,
         std::optional<tcp::Verdict> refused)
      : socket(std::move(socket)), served(contents, authenticator, peerOf(this->socket.number()).text(), refused) {}

  Socket socket;
  ServedClient served;
  Clock::time_point begin = Clock::now();
  short events = 0; // of the last poll
};

Status TcpPlace::check(const Deadline &deadline) const {
  if (authenticator.hasSecret() || insecure)
    return {};
  const Result<std::vector<SocketAddress>> addresses = resolve(where, deadline);
  if (!addresses.ok())
    return addresses.status();
  for (const SocketAddress &address : *addresses)
    if (!address.loopback())
      return invalid("the store at " + where.text() + " needs a secret, since other machines can reach " +
                     address.text() + ": give all processes the same secret (RESHARD_SECRET), or trust the network " +
                     "with 'insecure' (--insecure)");
  return {};
}

Result<std::shared_ptr<TcpServer>> TcpServer::serve(TcpPlace place, const TcpLimits &limits, const Deadline &deadline) {
  if (Status status = place.check(deadline); !status.ok())
    return status;
  const bool anyInterface = place.authenticator.hasSecret() || place.insecure;
  Result<Socket> listener = listenAt(place.where, anyInterface, deadline);
  if (!listener.ok())
    return listener.status();
  Socket wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.open())
    return systemError("create", "an eventfd");
  return std::shared_ptr<TcpServer>(new TcpServer(std::move(place), limits, std::move(*listener), std::move(wake)));
}

Result<std::shared_ptr<TcpServer>> TcpServer::shared(const TcpPlace &place, const Deadline &deadline) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<TcpServer>> servers;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<TcpServer> &entry = servers[place.where.text()];
  if (std::shared_ptr<TcpServer> existing = entry.lock()) {
    if (!existing->place_.authenticator.sameSecret(place.authenticator) || existing->place_.insecure != place.insecure)
      return invalid("this process serves the store at " + place.where.text() +
                     " already, with another secret or another value of 'insecure'");
    return existing;
  }
  Result<std::shared_ptr<TcpServer>> server = serve(place, {}, deadline);
  if (server.ok())
    entry = *server;
  return server;
}

TcpServer::TcpServer(TcpPlace place, const TcpLimits &limits, Socket listener, Socket wake)
    : place_(std::move(place)), limits_(limits), listener_(std::move(listener)), wake_(std::move(wake)),
      contents_(limits_.maxBytes), thread_([this] { loop(); }) {}

TcpServer::~TcpServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.number(), &one, sizeof one);
  thread_.join();
}

/// Waits for the next event. Returns the events of the listener, or -1 if the server is to end.
int TcpServer::wait() {
  std::vector<pollfd> polled{{wake_.number(), POLLIN, 0}, {listener_.number(), POLLIN, 0}};
  const Clock::time_point now = Clock::now();
  Clock::time_point next = Clock::time_point::max();
  if (now < acceptAgain_) {
    polled[1].events = 0;
    next = acceptAgain_;
  }
  for (Client &client : clients_) {
    const bool sends = !client.served.output().empty();
    polled.push_back({client.socket.number(), static_cast<short>(sends ? POLLOUT : POLLIN), 0});
    if (!client.served.joined())
      next = std::min(next, client.begin + limits_.handshake);
  }
  int timeout = -1;
  if (next != Clock::time_point::max())
    timeout = static_cast<int>(
        std::clamp<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count(), 0, 60'000));
  if (::poll(polled.data(), polled.size(), timeout) <= 0)
    for (pollfd &each : polled)
      each.revents = 0;
  size_t at = 2;
  for (Client &client : clients_)
    client.events = polled[at++].revents;
  return polled[0].revents ? -1 : polled[1].revents;
}

void TcpServer::loop() {
  while (true) {
    const int events = wait();
    if (events < 0)
      return;
    const Clock::time_point now = Clock::now();
    clients_.remove_if([&](Client &client) {
      if ((client.events & (POLLIN | POLLHUP | POLLERR)) && !read(client))
        return true;
      if (!client.served.output().empty() && !write(client))
        return true;
      const bool late = !client.served.joined() && now >= client.begin + limits_.handshake;
      return late || (client.served.closing() && client.served.output().empty());
    });
    if (events)
      accept();
  }
}

bool TcpServer::read(Client &client) {
  char buffer[1 << 16];
  const ssize_t bytes = ::recv(client.socket.number(), buffer, sizeof buffer, 0);
  if (bytes > 0)
    client.served.receive({buffer, static_cast<size_t>(bytes)});
  return bytes > 0 || (bytes < 0 && (errno == EAGAIN || errno == EINTR));
}

bool TcpServer::write(Client &client) {
  std::string &output = client.served.output();
  while (!output.empty()) {
    const ssize_t bytes = ::send(client.socket.number(), output.data(), output.size(), MSG_NOSIGNAL);
    if (bytes <= 0)
      return bytes < 0 && (errno == EAGAIN || errno == EINTR);
    output.erase(0, static_cast<size_t>(bytes));
    if (output.empty())
      client.served.sent();
  }
  return true;
}

/// Closes the oldest connection whose handshake is not complete. Returns false if there is none.
bool TcpServer::makeRoom() {
  const auto stranger =
      std::find_if(clients_.begin(), clients_.end(), [](const Client &client) { return !client.served.joined(); });
  if (stranger == clients_.end())
    return false;
  clients_.erase(stranger);
  return true;
}

void TcpServer::accept() {
  while (true) {
    Socket socket(::accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.open()) {
      add(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED)
      continue;
    const bool descriptors = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (descriptors && !makeRoom())
      acceptAgain_ = Clock::now() + std::chrono::milliseconds(100);
    if (!descriptors || Clock::now() < acceptAgain_)
      return;
  }
}

void TcpServer::add(Socket socket) {
  prepareConnection(socket.number());
  std::optional<tcp::Verdict> refused;
  if (clients_.size() >= limits_.maxClients && !makeRoom())
    refused = tcp::Verdict::full;
  else if (!place_.authenticator.hasSecret() && !place_.insecure && !ofSameUser(socket.number()))
    refused = tcp::Verdict::otherUser;
  if (refused && clients_.size() >= limits_.maxClients + 16) // they wait for a verdict that only a few get
    return;
  clients_.emplace_back(std::move(socket), contents_, place_.authenticator, refused);
}

} // namespace reshard
