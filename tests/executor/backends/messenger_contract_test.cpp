// SPDX-License-Identifier: Apache-2.0
// The contract of a Messenger, for the one in memory that other tests use and for the one of libreshard_ucx.so.

#include "base/backoff.h"
#include "executor/interfaces/channel.h"
#include "executor/interfaces/messenger.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ucx_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

using namespace reshard;
using tests::bytesOf;

namespace {

using Clock = std::chrono::steady_clock;

/// A messenger and the events that it has returned.
struct Side {
  explicit Side(std::unique_ptr<Messenger> opened) : messenger(std::move(opened)) {}
  /// Returns whether there was an event.
  bool poll() {
    const size_t before = events.size();
    while (messenger) {
      std::optional<MessengerEvent> event = messenger->poll();
      if (!event)
        break;
      events.push_back(std::move(*event));
    }
    return events.size() > before;
  }
  size_t count(MessengerEvent::Kind kind) const {
    return static_cast<size_t>(
        std::count_if(events.begin(), events.end(), [&](const MessengerEvent &each) { return each.kind == kind; }));
  }
  Messenger *operator->() const { return messenger.get(); }

  std::unique_ptr<Messenger> messenger;
  std::vector<MessengerEvent> events;
};

/// Polls messengers until the condition is true; false if it is not in time.
bool until(const std::vector<Side *> &sides, const std::function<bool()> &condition, double seconds = 20) {
  const Deadline deadline = deadlineIn(seconds);
  Backoff backoff;
  while (!condition()) {
    if (passed(deadline))
      return false;
    bool any = false;
    for (Side *side : sides)
      any = side->poll() || any;
    if (any)
      backoff.reset();
    else
      backoff.wait();
  }
  return true;
}

Frame frameOf(uint64_t first) {
  Frame frame;
  frame.words[0] = first;
  frame.words[7] = ~first;
  return frame;
}

bool hasUcx() {
  return std::filesystem::exists(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libreshard_ucx.so");
}

std::unique_ptr<Messenger> openUcx() {
  Result<std::unique_ptr<Messenger>> opened = openMessenger("ucx");
  EXPECT_EQ(opened.status().message(), "");
  return opened.ok() ? std::move(*opened) : nullptr;
}

/// As openUcx(), by a thread with a host name of its own: the others cannot read its memory. Null without root.
std::unique_ptr<Messenger> openElsewhere() {
  static std::atomic<int> hosts = 0;
  std::unique_ptr<Messenger> messenger;
  std::thread([&] {
    const std::string name = "host-" + std::to_string(++hosts);
    if (unshare(CLONE_NEWUTS) == 0 && sethostname(name.data(), name.size()) == 0)
      messenger = openUcx();
  }).join();
  return messenger;
}

/// Messengers in memory, over UCX, and over UCX without reading each other's memory.
class Contract : public testing::TestWithParam<const char *> {
protected:
  void SetUp() override {
    if (!local() && !hasUcx())
      GTEST_SKIP() << "libreshard_ucx.so was not built: UCX is missing, or this is a build with ThreadSanitizer";
    if (apart() && !openElsewhere())
      GTEST_SKIP() << "a host name of its own needs root";
  }
  bool local() const { return std::string(GetParam()) == "local"; }
  bool apart() const { return std::string(GetParam()) == "ucx_apart"; }
  std::unique_ptr<Messenger> open() { return local() ? network_.open() : apart() ? openElsewhere() : openUcx(); }

private:
  tests::LocalNetwork network_;
};

INSTANTIATE_TEST_SUITE_P(Of, Contract, testing::Values("local", "ucx", "ucx_apart"),
                         [](const auto &each) { return each.param; });

/// Two messengers; a is connected to b, and b knows a by its first frame.
struct Pair {
  Pair(std::unique_ptr<Messenger> first, std::unique_ptr<Messenger> second)
      : a(std::move(first)), b(std::move(second)) {
    const Result<uint32_t> peer = a->connect(b->address());
    EXPECT_EQ(peer.status().message(), "");
    toB = *peer;
    EXPECT_EQ(a->send(toB, frameOf(0)).message(), "");
    EXPECT_TRUE(until({&a, &b}, [&] { return b.count(MessengerEvent::kArrived) == 1; }));
    toA = b.events.at(0).peer;
    b.events.clear();
  }
  Side a, b;
  uint32_t toA = 0, toB = 0;
};

TEST_P(Contract, FramesArriveInOrderInBothDirections) {
  Pair pair(open(), open());
  for (uint64_t number = 1; number <= 300; ++number) {
    const std::string text(number % 3 == 0 ? kMaxFrameText : number % 7, static_cast<char>('a' + number % 26));
    EXPECT_EQ(pair.a->send(pair.toB, frameOf(number), text).message(), "");
    EXPECT_EQ(pair.b->send(pair.toA, frameOf(1000 + number), text).message(), "");
  }
  ASSERT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.a.events.size() == 300 && pair.b.events.size() == 300; }));
  for (uint64_t number = 1; number <= 300; ++number) {
    const std::string text(number % 3 == 0 ? kMaxFrameText : number % 7, static_cast<char>('a' + number % 26));
    for (const Side *side : {&pair.a, &pair.b}) {
      const MessengerEvent &event = side->events[number - 1];
      EXPECT_EQ(event.kind, MessengerEvent::kArrived);
      EXPECT_EQ(event.frame.words, frameOf(number + (side == &pair.a ? 1000 : 0)).words);
      EXPECT_TRUE(event.text == text);
      EXPECT_EQ(event.dataBytes, 0u);
    }
  }
  EXPECT_FALSE(pair.a->send(pair.toB, {}, std::string(kMaxFrameText + 1, ' ')).ok());
}

TEST_P(Contract, DataArriveWhenTheyAreAskedFor) {
  Pair pair(open(), open());
  const std::vector<size_t> sizes = {1, 2048, 2049, 100 << 10, 8 << 20};
  std::vector<std::vector<std::byte>> out, in;
  for (const size_t size : sizes) {
    out.push_back(bytesOf(size, size));
    in.emplace_back(size);
    EXPECT_EQ(pair.a->sendData(pair.toB, frameOf(size), out.back().data(), size, size).message(), "");
  }
  ASSERT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.b.events.size() == sizes.size(); }));
  EXPECT_EQ(pair.a.events.size(), 0u);
  for (size_t each = sizes.size(); each-- > 0;) { // in another order than they were sent
    const MessengerEvent event = pair.b.events[each];
    EXPECT_EQ(event.dataBytes, sizes[each]);
    EXPECT_EQ(event.frame.words[0], sizes[each]);
    EXPECT_EQ(pair.b->receive(event.peer, event.data, in[each].data(), 100 + each).message(), "");
    EXPECT_FALSE(pair.b->receive(event.peer, event.data, in[each].data(), 100 + each).ok()) << "received already";
  }
  ASSERT_TRUE(until({&pair.a, &pair.b}, [&] {
    return pair.a.count(MessengerEvent::kSent) == sizes.size() &&
           pair.b.count(MessengerEvent::kReceived) == sizes.size();
  }));
  EXPECT_TRUE(in == out);
  for (const Side *side : {&pair.a, &pair.b})
    for (const MessengerEvent &event : side->events)
      EXPECT_TRUE(event.ok);
  EXPECT_FALSE(pair.b->receive(pair.toA, 999, in[0].data(), 1).ok());
}

TEST_P(Contract, ADisconnectEndsTheTransfersOfBothSides) {
  for (const bool sender : {true, false}) {
    SCOPED_TRACE(sender);
    Pair pair(open(), open());
    const std::vector<std::byte> data = bytesOf(1, 1 << 20);
    std::vector<std::byte> to(data.size());
    for (const uint64_t token : {1, 2})
      EXPECT_EQ(pair.a->sendData(pair.toB, {}, data.data(), data.size(), token).message(), "");
    ASSERT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.b.events.size() == 2; }));
    const uint64_t number = pair.b.events[1].data;
    pair.b.events.clear();
    EXPECT_EQ(pair.b->receive(pair.toA, number, to.data(), 5).message(), "");
    Side &ends = sender ? pair.a : pair.b, &stays = sender ? pair.b : pair.a;
    ends->disconnect(sender ? pair.toB : pair.toA);
    std::fill(to.begin(), to.end(), std::byte{7});
    ASSERT_TRUE(until({&pair.a, &pair.b}, [&] { return stays.count(MessengerEvent::kLost) == 1; }));
    EXPECT_EQ(ends.events.size(), 0u);
    EXPECT_EQ(stays.events.back().kind, MessengerEvent::kLost);
    EXPECT_FALSE(stays.events.back().reason.ok());
    if (!sender) {
      EXPECT_EQ(std::count(to.begin(), to.end(), std::byte{7}), static_cast<ptrdiff_t>(to.size()));
      EXPECT_EQ(pair.a.count(MessengerEvent::kSent), 2u);
    }
    for (const MessengerEvent &event : stays.events)
      EXPECT_FALSE(event.kind != MessengerEvent::kLost && event.ok);
    EXPECT_FALSE(stays->send(stays.events.back().peer, {}).ok());
    // The numbers are used again, and nothing of the old connection arrives.
    const Result<uint32_t> again = ends->connect(stays->address());
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(ends->send(*again, frameOf(9)).message(), "");
    stays.events.clear();
    ASSERT_TRUE(until({&pair.a, &pair.b}, [&] { return !stays.events.empty(); }));
    EXPECT_EQ(stays.events[0].frame.words[0], 9u);
  }
}

TEST_P(Contract, WhoeverHasClosedIsLost) {
  Pair pair(open(), open());
  const std::string address = pair.b->address();
  EXPECT_EQ(pair.b->address(), address);
  pair.b.messenger.reset();
  ASSERT_TRUE(until({&pair.a}, [&] { return pair.a.count(MessengerEvent::kLost) == 1; }));
  EXPECT_EQ(pair.a.events.back().peer, pair.toB);
  EXPECT_FALSE(pair.a->send(pair.toB, {}).ok());
  pair.a.events.clear();
  const Result<uint32_t> again = pair.a->connect(address);
  ASSERT_TRUE(again.ok());
  ASSERT_TRUE(until({&pair.a}, [&] { return pair.a.count(MessengerEvent::kLost) == 1; }));
  EXPECT_FALSE(pair.a->connect("").ok());
  EXPECT_FALSE(pair.a->connect("nonsense").ok());
}

TEST_P(Contract, WhoeverClosesBeforeTheFirstFrameIsLost) {
  Side side(open());
  std::unique_ptr<Messenger> other = open();
  const Result<uint32_t> peer = side->connect(other->address());
  ASSERT_TRUE(peer.ok());
  other.reset();
  (void)side->send(*peer, {}); // fails if the connection is known to be lost
  ASSERT_TRUE(until({&side}, [&] { return side.count(MessengerEvent::kLost) == 1; }));
  EXPECT_EQ(side.events.back().peer, *peer);
}

TEST_P(Contract, ConnectionsAreMadeWhilePeersEnd) {
  // Both connect, in any order, also after the end of one. UCX aborts within a few rounds if it connects with blocking
  // sockets.
  std::mt19937 random(1);
  const auto connect = [](Side &from, const std::string &to) {
    const Result<uint32_t> peer = from->connect(to);
    if (peer.ok())
      (void)from->send(*peer, {}); // fails if the connection is known to be lost
    return peer.ok();
  };
  Side stays(open());
  size_t made = 0;
  for (int round = 0; round < 100; ++round) {
    Side ends(open());
    const std::string address = ends->address();
    for (uint32_t step = 0, last = 3 + random() % 12; step < last; ++step) {
      const uint32_t action = random() % 6;
      if (action == 0)
        made += connect(stays, address);
      else if (action == 1 && ends.messenger)
        connect(ends, stays->address());
      else if (action == 2 && step > 2)
        ends.messenger.reset();
      else
        for (uint32_t calls = random() % 6; calls-- > 0;)
          (random() % 2 == 0 ? stays : ends).poll();
    }
  }
  // The one that ends has connected, and does not read the answer: its socket here is broken, which nobody has noticed.
  for (int calls = 0; calls < 40; ++calls) {
    Side ends(open());
    const std::string address = ends->address();
    connect(ends, stays->address());
    for (int call = 0; call < calls % 4; ++call)
      ends.poll();
    for (int call = 0; call < calls / 4; ++call)
      stays.poll();
    ends.messenger.reset();
    made += connect(stays, address);
  }
  EXPECT_GT(made, 50u);
  // Of the connections of the others too, if a frame has arrived.
  EXPECT_TRUE(until({&stays}, [&] { return stays.count(MessengerEvent::kLost) >= made; }));
}

TEST_P(Contract, APeerThatTakesNothingFillsTheQueueAlone) {
  Pair pair(open(), open());
  size_t sent = 0;
  const std::string text(kMaxFrameText, 'x');
  while (sent < 100'000 && pair.a->send(pair.toB, {}, text).ok()) {
    ++sent;
    pair.a.poll();
  }
  EXPECT_GE(sent, kMaxFrames);
  EXPECT_LT(sent, 100'000u);
  const auto begin = Clock::now();
  pair.a->disconnect(pair.toB);
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(500));
}

TEST_P(Contract, APeerEndsAfterItsDisconnect) {
  // The peer takes a part of what fills the queue, and ends. Only then does the other side look: its socket has space,
  // and the end of the peer's connection.
  Pair pair(open(), open());
  const std::string text(kMaxFrameText, 'x');
  size_t sent = 0;
  for (; sent < 100'000 && pair.a->send(pair.toB, {}, text).ok(); ++sent)
    pair.a.poll();
  EXPECT_GE(sent, kMaxFrames);
  pair.a->disconnect(pair.toB);
  for (int calls = 0; calls < 10; ++calls)
    pair.a.poll();
  for (int calls = 0; calls < 10; ++calls)
    pair.b.poll();
  pair.b.messenger.reset();
  Side other(open()); // the messenger can still be used
  const Result<uint32_t> peer = pair.a->connect(other->address());
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(pair.a->send(*peer, frameOf(1)).message(), "");
  EXPECT_TRUE(until({&pair.a, &other}, [&] { return other.count(MessengerEvent::kArrived) == 1; }));
}

TEST_P(Contract, ReadsTheMemoryOfThisHost) {
  Pair pair(open(), open());
  EXPECT_EQ(pair.b->readsMemory(pair.toA), !apart());
  if (apart())
    return;
  const std::vector<std::byte> data = bytesOf(3, 100'000);
  std::vector<std::byte> to(data.size());
  EXPECT_TRUE(pair.b->readMemory(pair.toA, to.data(), reinterpret_cast<uint64_t>(data.data()), data.size()));
  EXPECT_TRUE(to == data);
}

/// Another process with a messenger, which connects to this one, sends a frame, and sends back all data that it gets.
/// It ends when it has lost the connection.
class Child {
public:
  Child(const std::string &address, bool apart) {
    std::string hex;
    for (const char each : address)
      for (const int shift : {4, 0})
        hex += "0123456789abcdef"[static_cast<unsigned char>(each) >> shift & 15];
    ::setenv("RESHARD_TEST_ADDRESS", hex.c_str(), 1);
    ::setenv("RESHARD_TEST_APART", apart ? "1" : "", 1);
    std::string program = "/proc/self/exe", filter = "--gtest_filter=MessengerChild.Runs", brief = "--gtest_brief=1";
    char *const arguments[] = {program.data(), filter.data(), brief.data(), nullptr};
    posix_spawn_file_actions_t output; // errors are printed to stderr by UCX
    posix_spawn_file_actions_init(&output);
    posix_spawn_file_actions_addopen(&output, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    EXPECT_EQ(posix_spawn(&process_, program.c_str(), &output, nullptr, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&output);
    ::unsetenv("RESHARD_TEST_ADDRESS");
  }
  Child(const Child &) = delete;
  Child &operator=(const Child &) = delete;
  ~Child() {
    signal(SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  void signal(int number) const { ::kill(process_, number); }
  bool hasEnded() const {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
  }

private:
  pid_t process_ = 0;
};

TEST(MessengerChild, Runs) {
  const char *const hex = std::getenv("RESHARD_TEST_ADDRESS");
  if (!hex)
    return; // runs as a process of other tests
  std::string address;
  for (size_t i = 0; hex[i] && hex[i + 1]; i += 2)
    address += static_cast<char>(std::stoi(std::string(hex + i, 2), nullptr, 16));
  Side side(*std::getenv("RESHARD_TEST_APART") ? openElsewhere() : openUcx());
  const Result<uint32_t> peer = side->connect(address);
  ASSERT_TRUE(peer.ok() && side->send(*peer, frameOf(1)).ok());
  std::map<uint64_t, std::vector<std::byte>> data; // by token
  const Deadline deadline = deadlineIn(60);
  for (uint64_t token = 0; !passed(deadline);) {
    side.poll();
    for (const MessengerEvent &event : std::exchange(side.events, {})) {
      if (event.kind == MessengerEvent::kLost)
        return;
      if (event.kind == MessengerEvent::kSent)
        data.erase(event.token);
      if (event.kind == MessengerEvent::kReceived && event.ok) {
        const std::vector<std::byte> &bytes = data[event.token];
        (void)side->sendData(*peer, frameOf(bytes.size()), bytes.data(), bytes.size(), event.token);
      }
      if (event.kind == MessengerEvent::kArrived && event.dataBytes > 0) {
        data[++token].resize(event.dataBytes);
        (void)side->receive(*peer, event.data, data[token].data(), token);
      }
    }
  }
  FAIL() << "the connection was not lost";
}

/// A messenger and a child that has connected to it.
class Processes : public Contract {
protected:
  void SetUp() override {
    Contract::SetUp();
    if (!IsSkipped())
      side_ = std::make_unique<Side>(open());
  }
  std::unique_ptr<Child> child() {
    auto made = std::make_unique<Child>((*side_)->address(), apart());
    side_->events.clear();
    EXPECT_TRUE(until({side_.get()}, [&] { return side_->count(MessengerEvent::kArrived) == 1; }));
    peer_ = side_->events.empty() ? 0 : side_->events[0].peer;
    side_->events.clear();
    return made;
  }
  /// Sends data to the child, and receives them back.
  void exchange(const std::vector<std::byte> &data) {
    std::vector<std::byte> back(data.size());
    EXPECT_EQ((*side_)->sendData(peer_, {}, data.data(), data.size(), 1).message(), "");
    ASSERT_TRUE(until({side_.get()}, [&] { return side_->events.size() == 2; }));
    for (const MessengerEvent &event : std::exchange(side_->events, {})) {
      if (event.kind == MessengerEvent::kArrived) {
        EXPECT_EQ((*side_)->receive(peer_, event.data, back.data(), 2).message(), "");
      } else {
        EXPECT_TRUE(event.kind == MessengerEvent::kSent && event.ok);
      }
    }
    ASSERT_TRUE(until({side_.get()}, [&] { return side_->events.size() == 1; }));
    EXPECT_TRUE(side_->events[0].kind == MessengerEvent::kReceived && side_->events[0].ok);
    EXPECT_TRUE(back == data);
    side_->events.clear();
  }
  void expectLost(double seconds) {
    EXPECT_TRUE(until({side_.get()}, [&] { return side_->count(MessengerEvent::kLost) == 1; }, seconds));
  }
  double disconnectSeconds() {
    const auto begin = Clock::now();
    (*side_)->disconnect(peer_);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  /// One round of connect, data both ways, and an end.
  void round(uint64_t number, std::mt19937_64 &random) {
    const std::unique_ptr<Child> other = child();
    for (const size_t size : {size_t{1}, size_t{2048}, size_t{100} << 10, size_t{8} << 20})
      exchange(bytesOf(number, size));
    const std::vector<std::byte> data = bytesOf(number, 8 << 20);
    if (number % 3 == 0) {
      (*side_)->disconnect(peer_);
      EXPECT_TRUE(until({side_.get()}, [&] { return other->hasEnded(); }));
      return;
    }
    EXPECT_EQ((*side_)->sendData(peer_, {}, data.data(), data.size(), 1).message(), "");
    (void)until({side_.get()}, [] { return false; }, static_cast<double>(1 + random() % 8000) * 1e-6);
    other->signal(number % 3 == 1 ? SIGKILL : SIGSTOP);
    if (number % 3 == 1) {
      expectLost(4);
    } else {
      (void)until({side_.get()}, [] { return false; }, 0.01);
      EXPECT_LT(disconnectSeconds(), 1.0);
    }
  }

  std::unique_ptr<Side> side_;
  uint32_t peer_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Of, Processes, testing::Values("ucx", "ucx_apart"),
                         [](const auto &each) { return each.param; });

TEST_P(Processes, AKilledProcessIsLostInTime) {
  const std::unique_ptr<Child> other = child();
  exchange(bytesOf(1, 100'000));
  other->signal(SIGKILL);
  expectLost(4); // two seconds on a machine that does nothing else
}

TEST_P(Processes, AStoppedProcessHoldsNobodyUp) {
  const std::unique_ptr<Child> other = child();
  const std::vector<std::byte> data = bytesOf(2, 8 << 20);
  exchange(data);
  other->signal(SIGSTOP);
  EXPECT_EQ((*side_)->sendData(peer_, {}, data.data(), data.size(), 5).message(), "");
  EXPECT_FALSE(until({side_.get()}, [&] { return !side_->events.empty(); }, 2));
  size_t sent = 0;
  const auto begin = Clock::now();
  while (sent < 100'000 && (*side_)->send(peer_, {}, std::string(kMaxFrameText, 'x')).ok())
    ++sent;
  EXPECT_GE(sent, kMaxFrames - 1);
  EXPECT_LT(sent, 100'000u);
  side_->poll();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(side_->events.empty());
  EXPECT_LT(disconnectSeconds(), 1.0);
}

// The next two are run by tests/e2e/run/messenger_test.py, which starts the peer on another host. RESHARD_TEST_FOLDER:
// where they meet.
class Hosts : public Processes {
protected:
  /// Publishes the address, and waits for the peer.
  void connectIn(const std::filesystem::path &folder) {
    std::ofstream(folder / "address.part") << (*side_)->address() << std::flush;
    std::filesystem::rename(folder / "address.part", folder / "address");
    ASSERT_TRUE(until({side_.get()}, [&] { return side_->events.size() == 1; }, 60));
    peer_ = side_->events[0].peer;
    side_->events.clear();
    EXPECT_FALSE((*side_)->readsMemory(peer_));
    for (const size_t size : {size_t{1}, size_t{2048}, size_t{100} << 10, size_t{32} << 20})
      exchange(bytesOf(size, size));
    std::ofstream(folder / "connected").flush();
  }
};

INSTANTIATE_TEST_SUITE_P(Of, Hosts, testing::Values("ucx"), [](const auto &each) { return each.param; });

TEST_P(Hosts, APeerThatEndsOrIsCutOffIsLost) {
  const char *const folder = std::getenv("RESHARD_TEST_FOLDER");
  if (!folder)
    GTEST_SKIP() << "run by tests/e2e/run/messenger_test.py";
  const std::filesystem::path at(folder);
  connectIn(at);
  const std::vector<std::byte> data = bytesOf(1, 1 << 20);
  EXPECT_EQ((*side_)->sendData(peer_, {}, data.data(), data.size(), 9).message(), "");
  expectLost(60);
  ASSERT_FALSE(side_->events.empty());
  std::ofstream(at / "reason") << side_->events.back().reason.message();
}

/// The frames before it, too, although the connection was closed while the network was cut.
TEST_P(Hosts, TheFarewellArrivesAfterACut) {
  const char *const folder = std::getenv("RESHARD_TEST_FOLDER");
  if (!folder)
    GTEST_SKIP() << "run by tests/e2e/run/messenger_test.py";
  const std::filesystem::path at(folder);
  connectIn(at);
  const auto exists = [&](const char *name) { return [=] { return std::filesystem::exists(at / name); }; };
  ASSERT_TRUE(until({side_.get()}, exists("cut"), 60));
  for (size_t frame = 0; frame < kMaxFrames - 10; ++frame)
    EXPECT_EQ((*side_)->send(peer_, {}, std::string(kMaxFrameText, 'x')).message(), "");
  (void)until({side_.get()}, [] { return false; }, 0.5);
  EXPECT_LT(disconnectSeconds(), 1.0);
  std::ofstream(at / "disconnected").flush();
  EXPECT_TRUE(until({side_.get()}, exists("end"), 60));
}

size_t openFiles() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

size_t residentBytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

/// RESHARD_ROUNDS sets the number of rounds.
TEST_P(Processes, RoundsLeaveNothingBehind) {
  const char *const set = std::getenv("RESHARD_ROUNDS");
  const uint64_t rounds = set ? std::stoull(set) : 12, first = std::max<uint64_t>(rounds / 4, 6);
  std::mt19937_64 random(7);
  size_t files = 0, bytes = 0;
  for (uint64_t number = 0; number < rounds && !HasFailure(); ++number) {
    SCOPED_TRACE("round " + std::to_string(number));
    round(number, random);
    if (number == first) {
      files = openFiles();
      bytes = residentBytes();
    }
  }
  (void)until({side_.get()}, [&] { return openFiles() <= files; }, 2);
  EXPECT_LE(openFiles(), files + 2); // a connection that is being closed
#ifndef __SANITIZE_ADDRESS__         // which keeps freed memory
  EXPECT_LE(residentBytes(), bytes + (48 << 20));
#endif
  if (set)
    std::cout << rounds << " rounds: descriptors " << files << " to " << openFiles() << ", resident MiB "
              << (bytes >> 20) << " to " << (residentBytes() >> 20) << "\n";
}

/// Where a channel finds the worker of a messenger in place of a channel's.
class Misled : public Rendezvous {
public:
  explicit Misled(std::string address)
      : hello_(tests::sealed(
            address.replace(0, sizeof kProtocol, kProtocol, sizeof kProtocol).replace(32, 32, 32, '\0'))) {}
  uint32_t rank() const override { return 0; }
  uint32_t size() const override { return 2; }
  Status join(std::string_view, const Deadline &) override { return {}; }
  Result<std::string> hello(uint32_t, const Deadline &) override { return hello_; }
  uint64_t session() const override { return 1; }

private:
  static constexpr char kProtocol[16] = "reshard-ucx-1:"; // of channels; without memory that a peer could read
  const std::string hello_;
};

TEST_P(Processes, MessagesOfAnotherProtocolAreDropped) {
  const std::unique_ptr<Child> other = child();
  Misled rendezvous((*side_)->address());
  Result<std::unique_ptr<Channel>> stranger = openChannel("ucx", {.seconds = 1, .rendezvous = &rendezvous});
  ASSERT_EQ(stranger.status().message(), "");
  (*stranger)->reserve(30);
  const auto begin = Clock::now();
  const std::vector<std::byte> garbage(100'000, std::byte{5});
  for (size_t request = 0; request < 30; ++request)
    EXPECT_EQ(
        (*stranger)->send(request, 1, 0, garbage.data(), request % 3 == 0 ? garbage.size() : 1 + request).message(),
        "");
  EXPECT_TRUE(until({side_.get()}, [&] {
    (void)(*stranger)->test(0);
    return (*side_)->dropped() >= 30; // the probes of the channel are counted, too
  }));
  const std::chrono::duration<double> time = Clock::now() - begin;
  EXPECT_LE((*side_)->dropped(), 30 + static_cast<uint64_t>(time.count() / 0.2) + 1); // a probe every 200 ms
  EXPECT_TRUE(side_->events.empty());
  (*stranger)->abandon(failed("the test ends"));
  exchange(bytesOf(4, 100'000));
}

TEST_P(Processes, AnAddressOfAnEarlierMessengerConnectsToNone) {
  std::string address = (*side_)->address();
  address[20] ^= 1; // its token
  EXPECT_FALSE((*side_)->connect(address).ok());
  Side stale(open());
  const Result<uint32_t> peer = stale->connect(tests::sealed(address));
  ASSERT_EQ(peer.status().message(), "");
  EXPECT_EQ(stale->send(*peer, {}).message(), "");
  EXPECT_TRUE(until({side_.get(), &stale}, [&] { return (*side_)->dropped() == 1; }));
  EXPECT_TRUE(side_->events.empty());
  if (!apart())
    return; // the same after kUnresponsiveSeconds
  EXPECT_TRUE(until({side_.get(), &stale}, [&] { return !stale.events.empty(); }, 2 * kUnresponsiveSeconds));
  EXPECT_EQ(stale.events[0].reason.message().find("the peer has "), 0u) << stale.events[0].reason.message();
}

TEST(LocalNetwork, FreezesCutsDelaysAndKills) {
  tests::LocalNetwork network;
  Pair pair(network.open("one"), network.open("two"));
  EXPECT_FALSE(pair.a->readsMemory(pair.toB));
  network.freeze(pair.b->address());
  EXPECT_EQ(pair.a->send(pair.toB, {}).message(), "");
  EXPECT_FALSE(until({&pair.a, &pair.b}, [&] { return !pair.b.events.empty(); }, 0.05));
  network.freeze(pair.b->address(), false);
  EXPECT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.b.events.size() == 1; }));
  network.delay(pair.b->address(), 0.1);
  EXPECT_EQ(pair.a->send(pair.toB, {}).message(), "");
  EXPECT_FALSE(until({&pair.a, &pair.b}, [&] { return pair.b.events.size() == 2; }, 0.05));
  EXPECT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.b.events.size() == 2; }));
  network.delay(pair.b->address(), 0);
  network.cut(pair.b->address());
  EXPECT_TRUE(until({&pair.a, &pair.b}, [&] {
    return pair.a.count(MessengerEvent::kLost) == 1 && pair.b.count(MessengerEvent::kLost) == 1;
  }));
  network.cut(pair.b->address(), false);
  const Result<uint32_t> again = pair.a->connect(pair.b->address());
  EXPECT_EQ(pair.a->send(*again, {}).message(), "");
  EXPECT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.b.count(MessengerEvent::kArrived) == 3; }));
  network.kill(pair.b->address());
  EXPECT_TRUE(until({&pair.a, &pair.b}, [&] { return pair.a.count(MessengerEvent::kLost) == 2; }));
  EXPECT_FALSE(pair.b->connect(pair.a->address()).ok());
}

} // namespace
