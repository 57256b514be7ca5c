// SPDX-License-Identifier: Apache-2.0
// Stores over TCP and in folders, and strangers that connect to a server.

#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/peer_users.h"
#include "executor/rendezvous/tcp_store.h"
#include "executor/rendezvous/url.h"
#include "tests/rendezvous/support.h"

#include <atomic>
#include <fstream>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

namespace reshard {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using tests::in;
using tests::secret;
using tests::valueOf;

const HostPort kAnyPort{"127.0.0.1", 0};

std::shared_ptr<TcpServer> serve(const Authenticator &authenticator = {}, TcpLimits limits = {}) {
  Result<std::shared_ptr<TcpServer>> server = TcpServer::serve({kAnyPort, authenticator, false}, limits, in(10'000));
  EXPECT_EQ(server.status().message(), "");
  return server.ok() ? *server : nullptr;
}

Result<std::unique_ptr<Store>> connect(uint16_t port, const Authenticator &authenticator = {},
                                       const Deadline &deadline = in(10'000)) {
  return TcpStore::connect({{"127.0.0.1", port}, authenticator, false}, nullptr, deadline);
}

std::string errorOf(const Result<std::unique_ptr<Store>> &store) { return store.status().message(); }

/// A socket that is connected to a server.
Socket stranger(uint16_t port) {
  const Result<std::vector<SocketAddress>> at = resolve({"127.0.0.1", port}, {});
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.number(), at->front().get(), at->front().bytes), 0);
  return socket;
}

/// The next client of a listener; waits for it.
Socket accepted(const Result<Socket> &listener) {
  pollfd polled{listener->number(), POLLIN, 0};
  ::poll(&polled, 1, 10'000);
  return Socket(::accept(listener->number(), nullptr, nullptr));
}

void say(const Socket &socket, std::string_view bytes) {
  [[maybe_unused]] const ssize_t sent = ::send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

/// Whether the server closes the connection within a time, after at most `bytes` bytes.
bool closed(const Socket &socket, int milliseconds, size_t bytes = 1000) {
  std::string all(bytes, '\0');
  for (const Deadline deadline = in(milliseconds); !passed(deadline);) {
    pollfd polled{socket.number(), POLLIN, 0};
    if (::poll(&polled, 1, 10) <= 0)
      continue;
    const ssize_t received = ::recv(socket.number(), all.data(), all.size(), 0);
    if (received <= 0)
      return true;
  }
  return false;
}

/// A network between a server and its clients, which connect to port(). It can hold all bytes back.
class Relay {
public:
  explicit Relay(uint16_t server) : server_(server), thread_([this] { loop(); }) {}
  ~Relay() {
    stop_ = true;
    thread_.join();
  }
  uint16_t port() const { return nameOf(listener_.number()).port(); }
  /// While it is cut, bytes wait; later they arrive.
  void cut(bool isCut) { cut_ = isCut; }
  /// Ends all connections.
  void drop() {
    drop_ = true;
    while (drop_)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

private:
  void loop() {
    for (; !stop_; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      if (drop_) {
        pairs_.clear();
        drop_ = false;
      }
      if (cut_)
        continue;
      if (Socket client(::accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC)); client.open())
        pairs_.emplace_back(std::move(client), stranger(server_));
      std::erase_if(pairs_,
                    [](const auto &pair) { return !pass(pair.first, pair.second) || !pass(pair.second, pair.first); });
    }
  }
  /// Passes on what has arrived; returns false once the sender has closed.
  static bool pass(const Socket &from, const Socket &to) {
    char bytes[4096];
    const ssize_t count = ::recv(from.number(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (count > 0)
      say(to, {bytes, static_cast<size_t>(count)});
    return count != 0;
  }

  const uint16_t server_;
  const Socket listener_ = std::move(*listenAt(kAnyPort, false, {}));
  std::vector<std::pair<Socket, Socket>> pairs_;
  std::atomic<bool> stop_{false}, cut_{false}, drop_{false};
  std::thread thread_;
};

std::string handshake(uint32_t version, uint8_t hasSecret) {
  return ByteWriter()
      .raw(tcp::kMagic)
      .number(version)
      .number(hasSecret)
      .raw(std::string(tcp::kChallengeBytes, 'c'))
      .take();
}

} // namespace

TEST(TcpStore, KeepsValuesOfAnySize) {
  const auto server = serve();
  const auto one = connect(server->port()), other = connect(server->port());
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_EQ(valueOf(**other, "a"), "");
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}, kMaxValueBytes}) {
    const std::string value(bytes, 'v');
    EXPECT_EQ((*one)->set("a", value, in(10'000)).message(), "");
    const auto found = (*other)->find("a", in(10'000));
    ASSERT_TRUE(found.ok() && *found);
    EXPECT_TRUE(**found == value);
  }
  EXPECT_THAT((*one)->set("a", std::string(kMaxValueBytes + 1, 'v'), in(10'000)).message(), HasSubstr("16777216"));
  EXPECT_THAT((*one)->set(std::string(kMaxKeyBytes + 1, 'k'), "", in(10'000)).message(), HasSubstr("4097"));
  EXPECT_EQ((*one)->set(std::string(kMaxKeyBytes, 'k'), "", in(10'000)).message(), "");
}

TEST(TcpStore, AFullServerStaysUsable) {
  const auto server = serve({}, {.maxBytes = 100'000});
  const auto one = connect(server->port());
  ASSERT_TRUE(one.ok());
  EXPECT_EQ((*one)->set("a", std::string(40'000, 'v'), in(10'000)).message(), "");
  EXPECT_THAT((*one)->set("b", std::string(40'000, 'v'), in(10'000)).message(), HasSubstr("no room for 40000"));
  EXPECT_EQ((*one)->set("a", std::string(30'000, 'w'), in(10'000)).message(), "");
  EXPECT_FALSE((*one)->set("c", std::string(80'000, 'v'), in(10'000)).ok()); // not even in transit
  const auto other = connect(server->port());
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(valueOf(**other, "a"), std::string(30'000, 'w'));
}

TEST(TcpStore, OnlyTheSameSecretIsServed) {
  const Authenticator right = secret("right"), wrong = secret("wrong");
  const auto server = serve(right);
  const auto good = connect(server->port(), right);
  ASSERT_TRUE(good.ok()) << errorOf(good);
  EXPECT_EQ((*good)->set("a", "1", in(10'000)).message(), "");
  const std::string name = "the store at 127.0.0.1:" + std::to_string(server->port());
  EXPECT_EQ(errorOf(connect(server->port(), wrong)),
            name + " has another secret: give all processes the same secret (RESHARD_SECRET)");
  EXPECT_EQ(errorOf(connect(server->port())), name + " expects a secret, and this process has none: give all processes "
                                                     "the same secret (RESHARD_SECRET)");
  EXPECT_EQ(valueOf(**good, kRefusalsKey),
            "rank 0's store refused 2 clients that did not have its secret, the last from 127.0.0.1");
  const auto open = serve();
  EXPECT_THAT(errorOf(connect(open->port(), right)), HasSubstr("has no secret, and this process has one"));
}

TEST(TcpStore, AServerMustProveItsSecret) {
  // An impostor accepts every proof and makes up its own.
  Result<Socket> listener = listenAt(kAnyPort, false, {});
  ASSERT_TRUE(listener.ok());
  std::thread impostor([&] {
    const Socket client = accepted(listener);
    say(client, ByteWriter()
                    .raw(tcp::kMagic)
                    .number(tcp::kVersion)
                    .number(uint8_t{0})
                    .raw(std::string(tcp::kChallengeBytes, 's'))
                    .number(uint8_t{0})
                    .raw(std::string(kMacBytes, 'm'))
                    .take());
    closed(client, 10'000);
  });
  EXPECT_THAT(errorOf(connect(nameOf(listener->number()).port(), secret("right"))),
              HasSubstr("could not prove that it has the secret"));
  impostor.join();
}

TEST(TcpStore, StrangersChangeNothingAndHoldNobodyUp) {
  const Authenticator right = secret("right");
  for (const Authenticator &authenticator : {Authenticator(), right}) {
    const auto server = serve(authenticator, {.handshake = std::chrono::milliseconds(300), .maxStrangers = 40});
    const auto one = connect(server->port(), authenticator);
    ASSERT_TRUE(one.ok());
    ASSERT_TRUE((*one)->set("a", "1", in(10'000)).ok());
    const Socket http = stranger(server->port()), silent = stranger(server->port()), half = stranger(server->port()),
                 version = stranger(server->port());
    say(http, "GET / HTTP/1.1\r\n\r\n");
    say(half, handshake(tcp::kVersion, 0).substr(0, 20));
    say(version, handshake(2, authenticator.hasSecret()));
    EXPECT_TRUE(closed(http, 10'000));
    EXPECT_TRUE(closed(version, 10'000));
    std::vector<Socket> crowd; // more than the server admits
    for (int i = 0; i < 60; ++i)
      crowd.push_back(stranger(server->port()));
    const auto late = connect(server->port(), authenticator);
    ASSERT_TRUE(late.ok()) << errorOf(late);
    EXPECT_EQ(valueOf(**late, "a"), "1");
    EXPECT_EQ(valueOf(**one, "a"), "1");
    EXPECT_TRUE(closed(silent, 10'000));
    EXPECT_TRUE(closed(half, 10'000));
  }
  // After the handshake: a request of unknown kind, of a wrong length, in part; and one that needs a secret first.
  const auto server = serve();
  const auto one = connect(server->port());
  ASSERT_TRUE(one.ok());
  ASSERT_TRUE((*one)->set("a", "1", in(10'000)).ok());
  for (const std::string &request : {std::string("\1\0\0\0\x09", 5), std::string("\xff\xff\xff\xff", 4),
                                     std::string("\5\0\0\0\1\xff\0\0\0", 9), std::string("\6\0\0\0\2\0\0\0\0x", 10)}) {
    const Socket client = stranger(server->port());
    say(client, handshake(tcp::kVersion, 0) + request);
    EXPECT_TRUE(closed(client, 10'000));
  }
  const Socket partial = stranger(server->port());
  say(partial, handshake(tcp::kVersion, 0) + std::string("\x10\0\0\0\1\1\0\0\0a", 10));
  const auto locked = serve(right);
  const Socket unproven = stranger(locked->port());
  say(unproven, handshake(tcp::kVersion, 1) + std::string(kMacBytes, 'm') + std::string("\7\0\0\0\1\1\0\0\0a2", 11));
  EXPECT_TRUE(closed(unproven, 10'000));
  const auto reader = connect(locked->port(), right);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(valueOf(**reader, "a"), "");
  EXPECT_EQ(valueOf(**one, "a"), "1");
}

TEST(TcpStore, OtherUsersNeedASecret) {
  if (::geteuid() != 0)
    GTEST_SKIP() << "only root can act as another user";
  const auto server = serve(), locked = serve(secret("s"));
  const auto insecure = *TcpServer::serve({kAnyPort, {}, true}, {}, {});
  std::thread other([&] {
    ::setfsuid(12345); // of this thread only
    EXPECT_THAT(errorOf(connect(server->port())), HasSubstr("it serves only processes of rank 0's user"));
    EXPECT_EQ(errorOf(connect(locked->port(), secret("s"))), "");
    EXPECT_EQ(errorOf(connect(insecure->port())), "");
  });
  other.join();
  EXPECT_EQ(errorOf(connect(server->port())), "");
}

TEST(TcpStore, ACrowdOfSilentClientsIsNotKept) {
  for (const Authenticator &authenticator : {Authenticator(), secret("right")}) {
    const auto server = serve(authenticator, {.handshake = std::chrono::minutes(5), .maxStrangers = 20});
    std::vector<Socket> crowd;
    for (int i = 0; i < 200; ++i) {
      crowd.push_back(stranger(server->port()));
      if (i % 2) // half of them have sent their handshake, and do not prove a secret
        say(crowd.back(), handshake(tcp::kVersion, 1));
    }
    const auto open = [&] {
      return std::count_if(crowd.begin(), crowd.end(), [](const Socket &each) { return !closed(each, 1); });
    };
    for (const Deadline deadline = in(20'000); open() > 20 && !passed(deadline);)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_LE(open(), 20);
    EXPECT_EQ(errorOf(connect(server->port(), authenticator)), "");
  }
}

TEST(TcpStore, StrangersLeaveTheProcessDescriptors) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int used = ::dup(0); // at least as many are open
  ::close(used);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(used) + 256;
  const auto server = serve(secret("right"));
  const auto one = connect(server->port(), secret("right"));
  ASSERT_TRUE(one.ok()) << errorOf(one);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<Socket> crowd; // both ends of each are in this process
  for (int i = 0; i < 120; ++i)
    crowd.push_back(stranger(server->port()));
  const auto late = connect(server->port(), secret("right"));
  EXPECT_EQ(errorOf(late), "");
  EXPECT_EQ((*one)->set("a", "1", in(10'000)).message(), "");
  std::vector<Socket> others; // such as UCX needs
  for (int i = 0; i < 80; ++i)
    EXPECT_TRUE(others.emplace_back(::dup(0)).open()) << i;
  while (others.back().number() + 8 < used + 256) // a client of the job leaves some, too
    others.emplace_back(::dup(0));
  EXPECT_THAT(errorOf(connect(server->port(), secret("right"))), HasSubstr("a higher limit of open files (ulimit -n)"));
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(TcpStore, AClientThatIsOustedBeforeItsProofConnectsAgain) {
  // The server closes the first connection when the client proves its secret.
  const auto server = serve(secret("right"));
  Result<Socket> listener = listenAt(kAnyPort, false, {});
  ASSERT_TRUE(listener.ok());
  std::thread ousting([&] {
    for (int connection = 0; connection < 2; ++connection) {
      const Socket client = accepted(listener), to = stranger(server->port());
      for (bool open = true; open;) {
        char bytes[256];
        pollfd ends[2] = {{client.number(), POLLIN, 0}, {to.number(), POLLIN, 0}};
        ::poll(ends, 2, 10'000);
        for (int from = 0; from < 2 && open; ++from) {
          const ssize_t count = ends[from].revents ? ::recv(ends[from].fd, bytes, sizeof bytes, 0) : -1;
          if (ends[from].revents && count <= 0)
            open = false;
          if (connection == 0 && from == 0 && count == static_cast<ssize_t>(kMacBytes))
            open = false;
          if (open && count > 0)
            say(from == 0 ? to : client, {bytes, static_cast<size_t>(count)});
        }
      }
    }
  });
  EXPECT_EQ(errorOf(connect(nameOf(listener->number()).port(), secret("right"))), "");
  ousting.join();
}

TEST(PeerUsers, BothSourcesKnowTheUserOfAnOpenConnection) {
  if (::geteuid() != 0)
    GTEST_SKIP() << "only root can act as another user";
  for (const auto &[host, to] : {std::pair("127.0.0.1", "127.0.0.1"), std::pair("::1", "::1"), std::pair("::", "::1"),
                                 std::pair("::", "127.0.0.1")}) {
    Result<Socket> listener = listenAt({host, 0}, false, {});
    if (!listener.ok() && std::string(host).find(':') != std::string::npos)
      continue; // a machine without IPv6
    ASSERT_EQ(listener.status().message(), "");
    const uint16_t port = nameOf(listener->number()).port();
    EXPECT_EQ(PeerUsers::open(listener->number()).status().message(), "");
    for (const auto source : {PeerUsers::Source::connection, PeerUsers::Source::table}) {
      SCOPED_TRACE(std::string(host) + " " + to + (source == PeerUsers::Source::table ? " table" : " connection"));
      Result<PeerUsers> users = PeerUsers::openAs(source);
      if (!users.ok() && source == PeerUsers::Source::connection)
        continue; // a sandbox without it
      ASSERT_EQ(users.status().message(), "");
      for (const uid_t user : {uid_t{0}, uid_t{12345}}) {
        std::optional<Socket> client;
        std::thread([&] {
          ::setfsuid(user); // of this thread only
          const Result<std::vector<SocketAddress>> at = resolve({to, port}, {});
          client.emplace(::socket(at->front().storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
          EXPECT_EQ(::connect(client->number(), at->front().get(), at->front().bytes), 0);
        }).join();
        const Socket served = accepted(listener);
        const auto open = users->userOf(served.number());
        EXPECT_TRUE(open.ok() && *open == user);
        client.reset(); // the kernel shows a closed socket as root's
        const auto gone = users->userOf(served.number());
        EXPECT_TRUE(gone.ok() && !*gone);
      }
    }
  }
}

TEST(TcpStore, AProcessWithoutDescriptorsIsNoStranger) {
  const auto server = serve();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur =
      static_cast<rlim_t>(Socket(::dup(0)).number()) + 3; // both ends of a connection, and one to ask rank 0 by
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string error = errorOf(connect(server->port(), {}, in(1'000)));
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, "");
}

TEST(TcpStore, ASlowReaderIsNotWaitedFor) {
  const auto server = serve();
  const auto one = connect(server->port());
  ASSERT_TRUE(one.ok());
  ASSERT_TRUE((*one)->set("a", std::string(kMaxValueBytes, 'v'), in(10'000)).ok());
  const Socket slow = stranger(server->port());
  const std::string find("\6\0\0\0\2\1\0\0\0a", 10);
  say(slow, handshake(tcp::kVersion, 0) + find + find + find);
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ((*one)->set("b", std::to_string(i), in(5'000)).message(), "");
}

TEST(TcpStore, BothEndsNoticeAMachineWithoutPower) {
  const std::shared_ptr<TcpServer> server = serve();
  const Result<std::unique_ptr<Store>> store = connect(server->port());
  ASSERT_EQ(errorOf(store), "");
  ASSERT_EQ((*store)->set("key", "value", in(10'000)).message(), "");
  int ends = 0;
  for (int number = 0; number < 1024; ++number) { // the sockets of this process
    int keepsAlive = 0, milliseconds = 0;
    socklen_t bytes = sizeof(int);
    const uint16_t port = server->port();
    if (peerOf(number).port() != port && nameOf(number).port() != port)
      continue;
    if (getsockopt(number, SOL_SOCKET, SO_KEEPALIVE, &keepsAlive, &bytes) != 0 || peerOf(number).port() == 0)
      continue; // the socket that listens
    EXPECT_EQ(getsockopt(number, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &bytes), 0);
    EXPECT_EQ(keepsAlive, 1);
    EXPECT_EQ(milliseconds, 25'000);
    ++ends;
  }
  EXPECT_EQ(ends, 2);
}

TEST(TcpStore, ConnectsWhenTheServerStartsLater) {
  uint16_t port = 0;
  {
    port = serve()->port();
  }
  std::shared_ptr<TcpServer> server;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    server = *TcpServer::serve({{"127.0.0.1", port}, {}, false}, {}, {});
  });
  EXPECT_EQ(errorOf(connect(port)), "");
  later.join();
}

TEST(TcpStore, NamesWhatIsWrong) {
  auto server = serve();
  const uint16_t port = server->port();
  const std::string at = "127.0.0.1:" + std::to_string(port);
  const auto client = connect(port);
  ASSERT_TRUE(client.ok());
  EXPECT_EQ(TcpServer::serve({{"127.0.0.1", port}, {}, false}, {}, {}).status().message(),
            "rank 0 cannot serve the store at " + at +
                ": another process uses the port; choose another port, or end that process");
  server.reset();
  const Status gone = (*client)->set("a", "1", in(5'000));
  EXPECT_THAT(gone.message(), StartsWith("lost the store at " + at));
  EXPECT_THAT((*client)->set("a", "1", in(5'000)).message(), StartsWith("lost the store at " + at));
  const auto nobody = connect(port, {}, in(50));
  EXPECT_EQ(errorOf(nobody),
            "timed out: cannot connect to the store at " + at +
                ": Connection refused; rank 0 of the job serves it: if it has ended, its own error is the cause");
  EXPECT_TRUE(nobody.status().timedOut());
  const TcpStoreConfig unknown{{"no-such-host.invalid", 1234}, {}, false};
  EXPECT_THAT(TcpStore::connect(unknown, nullptr, in(20'000)).status().message(),
              HasSubstr("the host 'no-such-host.invalid'"));
  const std::string reachable = "the store at 192.0.2.1:1234 needs a secret, since other machines can reach 192.0.2.1";
  for (const bool serves : {false, true})
    EXPECT_THAT(openStore({"tcp://192.0.2.1:1234", serves, {}, false}, in(5'000)).status().message(),
                StartsWith(reachable));
  EXPECT_THAT(openStore({"tcp://192.0.2.1:1234", true, secret("s"), false}, in(5'000)).status().message(),
              HasSubstr("192.0.2.1:1234: it is no address of this machine"));
}

TEST(TcpStore, RankZeroSaysWhyItServesNoStore) {
  // Programs that have the port: one that never answers, one that closes each connection. The last of the askers comes
  // first, and has no deadline.
  for (const bool closes : {false, true})
    for (const Authenticator &authenticator : {Authenticator(), secret("right")}) {
      Result<Socket> listener = listenAt(kAnyPort, false, {});
      ASSERT_TRUE(listener.ok());
      const uint16_t port = nameOf(listener->number()).port();
      std::atomic<bool> stop{false};
      std::thread closing([&] {
        while (closes && !stop) {
          pollfd polled{listener->number(), POLLIN, 0};
          if (::poll(&polled, 1, 10) > 0)
            Socket(::accept(listener->number(), nullptr, nullptr));
        }
      });
      const std::string reason = "rank 0 cannot serve the store at 127.0.0.1:" + std::to_string(port) +
                                 ": another process uses the port; choose another port, or end that process";
      std::vector<std::thread> others;
      for (int rank = 1; rank < 4; ++rank)
        others.emplace_back([&, deadline = rank == 1 ? Deadline() : in(30'000)] {
          EXPECT_EQ(errorOf(connect(port, authenticator, deadline)), reason);
        });
      std::thread stranger([&] { // without the secret, or with one of its own, it learns nothing that it believes
        if (authenticator.hasSecret()) {
          EXPECT_THAT(errorOf(connect(port, secret("wrong"), in(700))), StartsWith("timed out"));
        }
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const auto begin = std::chrono::steady_clock::now();
      const StoreOptions config{"tcp://127.0.0.1:" + std::to_string(port), true, authenticator, false};
      const Status status = openStore(config, in(30'000)).status();
      EXPECT_EQ(status.message(), reason);
      tellWhyNotServed(config, {"job", "plan", 0, 4, authenticator}, status, in(30'000));
      for (std::thread &each : others)
        each.join();
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
      stranger.join();
      stop = true;
      closing.join();
    }
}

TEST(TcpStore, ANetworkThatIsCutIsTriedUntilTheDeadline) {
  const HostPort elsewhere{"192.0.2.1", 1234};
  const TcpStoreConfig config{elsewhere, secret("s"), false};
  Result<std::unique_ptr<Store>> found = failed("not tried");
  bool apart = false;
  std::thread([&] { // a thread of a network without interfaces, as its host is while it is cut off
    apart = unshare(CLONE_NEWNET) == 0;
    if (apart)
      found = TcpStore::connect(config, nullptr, in(50));
  })
      .join();
  if (!apart)
    GTEST_SKIP() << "a network of its own needs root";
  EXPECT_EQ(errorOf(found),
            "timed out: cannot connect to the store at 192.0.2.1:1234: Network is unreachable; rank 0 of "
            "the job serves it: if it has ended, its own error is the cause");
  EXPECT_TRUE(found.status().timedOut());
}

TEST(TcpStore, ACallAfterATimeoutOrALossConnectsAgain) {
  for (const Authenticator &authenticator : {Authenticator(), secret("right")}) {
    const auto server = serve(authenticator);
    Relay network(server->port());
    const auto far = connect(network.port(), authenticator), near = connect(server->port(), authenticator);
    ASSERT_TRUE(far.ok() && near.ok()) << errorOf(far);
    ASSERT_TRUE((*near)->set("a", "1", in(10'000)).ok() && (*near)->set("b", "2", in(10'000)).ok());
    network.cut(true);
    for (int i = 0; i < 2; ++i) { // the second call has to connect first
      const Status late = (*far)->find("a", in(50)).status();
      EXPECT_TRUE(late.timedOut()) << late.message();
    }
    network.cut(false); // the answers of "a" arrive now
    EXPECT_EQ(valueOf(**far, "b"), "2");
    network.drop();
    EXPECT_EQ(valueOf(**far, "a"), "1"); // in the same call
    network.drop();
    EXPECT_EQ((*far)->set("a", "3", in(10'000)).message(), "");
    EXPECT_EQ(valueOf(**near, "a"), "3");
  }
}

TEST(TcpStore, ACallReachesAServerThatStartsAgain) {
  auto server = serve(secret("right"));
  const uint16_t port = server->port();
  const auto client = connect(port, secret("right"));
  ASSERT_TRUE(client.ok());
  server.reset();
  for (const char *why : {"", "an earlier request failed; "}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::string error = (*client)->find("a", in(60'000)).status().message();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    EXPECT_THAT(error, HasSubstr(why));
    EXPECT_THAT(error, HasSubstr("rank 0 may have ended; cannot connect to the store at 127.0.0.1:"));
  }
  const TcpStoreConfig config{{"127.0.0.1", port}, secret("wrong"), false};
  server = *TcpServer::serve(config, {}, {});
  EXPECT_THAT((*client)->find("a", in(10'000)).status().message(), HasSubstr("has another secret"));
  server.reset();
  server = *TcpServer::serve({config.where, secret("right"), false}, {}, {});
  EXPECT_EQ((*client)->set("a", "1", in(10'000)).message(), "");
  EXPECT_EQ(valueOf(**client, "a"), "1");
}

TEST(TcpStore, AnotherProgramOrVersionAtThePort) {
  for (const auto &[answer, expected] :
       {std::pair(std::string("HTTP/1.1 400 Bad Request\r\n\r\nand more than enough bytes"),
                  "is served by another program"),
        std::pair(ByteWriter().raw(tcp::kMagic).number(uint32_t{7}).raw(std::string(33, 'x')).take(),
                  "has version 7 of the protocol, expected 1")}) {
    Result<Socket> listener = listenAt(kAnyPort, false, {});
    ASSERT_TRUE(listener.ok());
    std::thread other([&, answer = answer] {
      const Socket client = accepted(listener);
      say(client, answer);
      closed(client, 10'000);
    });
    EXPECT_THAT(errorOf(connect(nameOf(listener->number()).port())), HasSubstr(expected));
    other.join();
  }
}

TEST(TcpStore, ExecutorsOfOneProcessShareAServer) {
  uint16_t port = 0;
  {
    port = serve()->port();
  }
  const std::string url = "tcp://localhost:" + std::to_string(port);
  auto one = openStore({url, true, {}, false}, in(5'000));
  ASSERT_TRUE(one.ok()) << errorOf(one);
  auto other = openStore({url, true, {}, false}, in(5'000));
  ASSERT_TRUE(other.ok()) << errorOf(other);
  EXPECT_THAT(errorOf(openStore({url, true, secret("s"), false}, in(5'000))), HasSubstr("another secret"));
  ASSERT_TRUE((*one)->set("a", "1", in(5'000)).ok());
  one = failed("closed");
  EXPECT_EQ(valueOf(**other, "a"), "1");
}

TEST(FileStore, KeepsValues) {
  const tests::TemporaryFolder folder;
  FileStore store(folder.path(), false), other(folder.path(), false);
  EXPECT_EQ(store.open().message(), "");
  EXPECT_EQ(valueOf(store, "a"), "");
  const std::string value("a\0b", 3), longKey(3000, '/');
  for (const std::string &key : {std::string("reshard/a/../b"), std::string("reshard/a%2fb"), longKey}) {
    EXPECT_EQ(store.set(key, value, {}).message(), "");
    EXPECT_EQ(valueOf(other, key), value);
    EXPECT_EQ(store.set(key, "", {}).message(), "");
    EXPECT_TRUE(**other.find(key, {}) == "");
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 3);
  EXPECT_THAT(FileStore(folder.path() + "/made", false).open().message(), "");
  EXPECT_TRUE(std::filesystem::is_directory(folder.path() + "/made")); // made
  EXPECT_THAT(FileStore(folder.path() + "/none/folder", false).open().message(),
              StartsWith("cannot make the folder '" + folder.path() + "/none/folder': No such file or directory; "));
  std::ofstream(folder.path() + "/file") << "text";
  EXPECT_THAT(FileStore(folder.path() + "/file", false).open().message(),
              HasSubstr("file' is not a folder, expected a folder that all processes of the job share"));
}

TEST(FileStore, ValuesOfOtherUsersNeedASecret) {
  if (::geteuid() != 0)
    GTEST_SKIP() << "only root can give a file to another user";
  const tests::TemporaryFolder folder;
  FileStore store(folder.path(), false), any(folder.path(), true);
  ASSERT_TRUE(store.set("a", "1", {}).ok());
  ASSERT_EQ(::chown((folder.path() + "/a").c_str(), 12345, 0), 0);
  EXPECT_THAT(store.find("a", {}).status().message(), HasSubstr("was written by user 12345, expected user 0"));
  EXPECT_EQ(valueOf(any, "a"), "1");
}

TEST(Url, NamesTheSchemes) {
  const std::string expected = ", expected tcp://host:port, file:///folder or env://";
  for (const auto &[url, found] : {std::pair("udp://a:1", "the scheme 'udp'"), std::pair("localhost:1", "no scheme"),
                                   std::pair("file://folder", "a relative path")})
    EXPECT_EQ(errorOf(openStore({url, false, {}, false}, in(1'000))),
              "rendezvous '" + std::string(url) + "': found " + found + expected);
  for (const char *config : {"a", "a:", ":1", "a:0", "a:65536", "a:1x", "::1:5", "a:1/b"})
    EXPECT_THAT(errorOf(openStore({"tcp://" + std::string(config), false, {}, false}, in(1'000))),
                HasSubstr("found '" + std::string(config) + "', expected host:port"));
  EXPECT_EQ(hostPort("[::1]:5")->host, "::1");
  EXPECT_EQ(hostPort("[::1]:5")->text(), "[::1]:5");
}

TEST(Hmac, TestVectorOfRfc4231) {
  const Authenticator jefe = secret("Jefe");
  std::string text;
  for (const char each : jefe.mac("what do ya want for nothing?"))
    for (const int digit : {static_cast<unsigned char>(each) >> 4, each & 15})
      text += "0123456789abcdef"[digit];
  EXPECT_EQ(text, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_TRUE(jefe.verify("m", jefe.mac("m")));
  EXPECT_FALSE(jefe.verify("n", jefe.mac("m")));
  EXPECT_FALSE(jefe.verify("m", jefe.mac("m").substr(1)));
  for (size_t i = 0; i < jefe.mac("m").size(); ++i) { // every byte counts
    std::string changed = jefe.mac("m");
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(jefe.verify("m", changed)) << i;
  }
  EXPECT_FALSE(Authenticator().verify("m", ""));
}

} // namespace reshard
