// SPDX-License-Identifier: Apache-2.0
// One thread polls the listener and all clients. A client is a stranger until its handshake is complete; strangers are
// few, and the oldest is closed for a new one.
#include "executor/rendezvous/tcp_server.h"

#include "base/system_error.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

namespace reshard {

struct TcpServer::Client {
  Client(Socket socket, StoreContents &contents, const Authenticator &authenticator, ServedClient::Decide decide)
      : socket(std::move(socket)),
        served(contents, authenticator, peerOf(this->socket.number()).text(), std::move(decide)) {}

  Socket socket;
  ServedClient served;
  Clock::time_point begin = Clock::now();
  short events = 0; // what the last poll found
};

namespace {

/// Connections that are accepted before clients are served again.
constexpr int kAtOnce = 16;
/// The strangers of a process that has few descriptors left: as many as are accepted at once, so that each of them is
/// served once.
constexpr size_t kFewStrangers = kAtOnce;

/// The descriptors that this process may have.
size_t mostDescriptors() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<size_t>(limit.rlim_cur) : 1024;
}

} // namespace

Status TcpStoreConfig::check(const Deadline &deadline) const {
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

Result<std::shared_ptr<TcpServer>> TcpServer::serve(TcpStoreConfig config, const TcpLimits &limits,
                                                    const Deadline &deadline) {
  if (Status status = config.check(deadline); !status.ok())
    return status;
  const bool anyInterface = config.authenticator.hasSecret() || config.insecure;
  Result<Socket> listener = listenAt(config.where, anyInterface, deadline);
  if (!listener.ok())
    return listener.status();
  Socket wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.open())
    return systemError("create", "an eventfd");
  std::optional<PeerUsers> users;
  if (!anyInterface) {
    Result<PeerUsers> opened = PeerUsers::open(listener->number());
    if (!opened.ok())
      return opened.status();
    users = std::move(*opened);
  }
  return std::shared_ptr<TcpServer>(
      new TcpServer(std::move(config), limits, std::move(*listener), std::move(wake), std::move(users)));
}

Result<std::shared_ptr<TcpServer>> TcpServer::shared(const TcpStoreConfig &config, const Deadline &deadline) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<TcpServer>> servers;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<TcpServer> &entry = servers[config.where.text()];
  if (std::shared_ptr<TcpServer> existing = entry.lock()) {
    if (!existing->config_.authenticator.sameSecret(config.authenticator) ||
        existing->config_.insecure != config.insecure)
      return invalid("this process serves the store at " + config.where.text() +
                     " already, with another secret or another value of 'insecure'");
    return existing;
  }
  Result<std::shared_ptr<TcpServer>> server = serve(config, {}, deadline);
  if (server.ok())
    entry = *server;
  return server;
}

TcpServer::TcpServer(TcpStoreConfig config, const TcpLimits &limits, Socket listener, Socket wake,
                     std::optional<PeerUsers> users)
    : config_(std::move(config)), limits_(limits), listener_(std::move(listener)), wake_(std::move(wake)),
      users_(std::move(users)), contents_(limits_.maxBytes), thread_([this] { loop(); }) {}

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
  for (std::list<Client> *clients : {&strangers_, &members_})
    for (Client &client : *clients) {
      const bool sends = !client.served.output().empty();
      polled.push_back({client.socket.number(), static_cast<short>(sends ? POLLOUT : POLLIN), 0});
    }
  if (!strangers_.empty())
    next = std::min(next, strangers_.front().begin + limits_.handshake);
  int timeout = -1;
  if (next != Clock::time_point::max())
    timeout = static_cast<int>(
        std::clamp<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count(), 0, 60'000));
  if (::poll(polled.data(), polled.size(), timeout) <= 0)
    for (pollfd &each : polled)
      each.revents = 0;
  size_t at = 2;
  for (std::list<Client> *clients : {&strangers_, &members_})
    for (Client &client : *clients)
      client.events = polled[at++].revents;
  return polled[0].revents ? -1 : polled[1].revents;
}

void TcpServer::loop() {
  while (true) {
    const int events = wait();
    if (events < 0)
      return;
    const Clock::time_point now = Clock::now();
    for (std::list<Client> *clients : {&strangers_, &members_})
      clients->remove_if([&](Client &client) { return !serve(client); });
    strangers_.remove_if([&](const Client &client) { return now >= client.begin + limits_.handshake; });
    for (auto next = strangers_.begin(); next != strangers_.end();)
      if (const auto at = next++; at->served.joined())
        members_.splice(members_.end(), strangers_, at);
    if (events)
      accept();
  }
}

/// Handles the events of the last poll.
bool TcpServer::serve(Client &client) {
  if ((client.events & (POLLIN | POLLHUP | POLLERR)) && !read(client))
    return false;
  if (!client.served.output().empty() && !write(client))
    return false;
  return !client.served.closing() || !client.served.output().empty();
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

/// Closes the oldest stranger, first one that has said nothing. Returns false if there is none.
bool TcpServer::makeRoom() {
  auto oldest = std::find_if(strangers_.begin(), strangers_.end(),
                             [](const Client &client) { return !client.served.handshakeReceived(); });
  if (oldest == strangers_.end())
    oldest = strangers_.begin();
  if (oldest == strangers_.end())
    return false;
  strangers_.erase(oldest);
  return true;
}

void TcpServer::accept() {
  for (int left = kAtOnce; left > 0; --left) {
    Socket socket(::accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.open()) {
      add(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED)
      continue;
    const bool descriptors = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (descriptors && makeRoom())
      continue;
    if (descriptors)
      acceptAgain_ = Clock::now() + std::chrono::milliseconds(100);
    return;
  }
}

void TcpServer::add(Socket socket) {
  prepareConnection(socket.number());
  // A new descriptor has the least free number, so at least as many are in use. The rest of the process needs some: UCX
  // ends it if there are none. So strangers have an eighth, and few of the last quarter; clients of the job leave a
  // sixteenth.
  const int number = socket.number();
  const size_t most = mostDescriptors(), used = static_cast<size_t>(number);
  const size_t mostStrangers = used < most - most / 4 ? std::max(most / 8, kFewStrangers) : kFewStrangers;
  while (strangers_.size() >= std::min(mostStrangers, limits_.maxStrangers))
    makeRoom();
  const bool full = members_.size() >= limits_.maxClients || used >= most - most / 16;
  Client &client = strangers_.emplace_back(std::move(socket), contents_, config_.authenticator,
                                           [this, number, full] { return decide(number, full); });
  client.events = POLLIN; // the handshake may have arrived already
  if (!serve(client))
    strangers_.pop_back();
  else if (client.served.joined())
    members_.splice(members_.end(), strangers_, std::prev(strangers_.end()));
}

/// The verdict on a client whose handshake has arrived.
std::optional<tcp::Verdict> TcpServer::decide(int socket, bool full) {
  if (full)
    return tcp::Verdict::full;
  if (!users_)
    return tcp::Verdict::accepted;
  const Result<std::optional<uid_t>> user = users_->userOf(socket);
  if (!user.ok())
    return {};
  if (!*user && peerOf(socket).loopback()) // it has been closed
    return {};
  return *user == ::geteuid() ? tcp::Verdict::accepted : tcp::Verdict::otherUser;
}

} // namespace reshard
