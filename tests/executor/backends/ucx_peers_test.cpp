// SPDX-License-Identifier: Apache-2.0
// The channel of transport `ucx` beside a process that is killed or stopped.

#include "base/backoff.h"
#include "executor/interfaces/channel.h"
#include "executor/rendezvous/store_rendezvous.h"
#include "executor/rendezvous/url.h"
#include "tests/executor/ucx_case.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>

using namespace reshard;

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char *kFolder = "RESHARD_TEST_FOLDER";     // of the peer's process: where both meet
constexpr uint32_t kFirst = 1, kQuestion = 2, kAnswer = 3; // tags
constexpr double kStart = 20;

/// One of two processes that meet in a folder.
struct Process {
  Process(const std::string &folder, uint32_t rank) {
    const Authenticator authenticator = *Authenticator::create("");
    store = std::move(*openStore({"file://" + folder, rank == 0, authenticator, false}, deadlineIn(kStart)));
    rendezvous = std::make_unique<StoreRendezvous>(*store, JobOptions{"", "plan", rank, 2, authenticator});
    Result<std::unique_ptr<Channel>> opened = openChannel("ucx", {.seconds = kStart, .rendezvous = rendezvous.get()});
    EXPECT_EQ(opened.status().message(), "");
    channel = opened.ok() ? std::move(*opened) : nullptr;
    if (channel)
      channel->reserve(4);
  }
  Status wait(size_t request, double seconds = kStart) const { return tests::waitFor(*channel, request, seconds); }
  Channel *operator->() const { return channel.get(); }

  std::unique_ptr<Store> store;
  std::unique_ptr<Rendezvous> rendezvous;
  std::unique_ptr<Channel> channel;
};

/// Rank 1, a process of its own. It sends a number, and answers a question.
class Peer {
public:
  explicit Peer(const std::string &folder) {
    ::setenv(kFolder, folder.c_str(), 1);
    const char *const arguments[] = {"/proc/self/exe", "--gtest_filter=UcxPeer.DISABLED_Process",
                                     "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr};
    EXPECT_EQ(posix_spawn(&process_, arguments[0], nullptr, nullptr, const_cast<char *const *>(arguments), environ), 0);
    ::unsetenv(kFolder);
  }
  ~Peer() {
    signal(SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Peer(const Peer &) = delete;
  Peer &operator=(const Peer &) = delete;
  void signal(int number) const { kill(process_, number); }

private:
  pid_t process_ = 0;
};

TEST(UcxPeer, DISABLED_Process) {
  const char *folder = std::getenv(kFolder);
  if (!folder)
    GTEST_SKIP() << "the other tests start it";
  const Process mine(folder, 1);
  uint64_t first = 11, question = 0;
  EXPECT_EQ(mine->send(0, 0, kFirst, reinterpret_cast<std::byte *>(&first), sizeof first).message(), "");
  EXPECT_EQ(mine.wait(0).message(), "");
  EXPECT_EQ(mine->receive(1, 0, kQuestion, reinterpret_cast<std::byte *>(&question), sizeof question).message(), "");
  EXPECT_EQ(mine.wait(1, 60).message(), "");
  EXPECT_EQ(mine->send(2, 0, kAnswer, reinterpret_cast<std::byte *>(&question), sizeof question).message(), "");
  EXPECT_EQ(mine.wait(2).message(), "");
}

class UcxPeers : public tests::UcxCase {
protected:
  const tests::TemporaryFolder folder;
};

INSTANTIATE_TEST_SUITE_P(Over, UcxPeers, testing::Values("", "tcp"),
                         [](const auto &each) { return *each.param ? std::string(each.param) : std::string("any"); });

/// Polls until `status` gives an error.
template <class Poll> Status firstError(double seconds, Poll status) {
  Backoff backoff;
  for (const Deadline deadline = deadlineIn(seconds); !passed(deadline); backoff.wait())
    if (Status found = status(); !found.ok())
      return found;
  return {};
}

// This process waits for the peer, by a receive or without one, and sends nothing by which it would notice that the
// connection is lost.
TEST_P(UcxPeers, AKilledPeerIsNoticed) {
  for (const bool receives : {true, false}) {
    SCOPED_TRACE(receives);
    const std::string place = folder / (receives ? "receives" : "checks");
    std::filesystem::create_directory(place);
    const Peer peer(place);
    const Process mine(place, 0);
    uint64_t value = 0;
    const auto data = reinterpret_cast<std::byte *>(&value);
    EXPECT_EQ(mine->receive(0, 1, kFirst, data, sizeof value).message(), "");
    ASSERT_EQ(mine.wait(0).message(), "");
    EXPECT_EQ(value, 11u);
    if (receives) {
      EXPECT_EQ(mine->receive(1, 1, kAnswer, data, sizeof value).message(), "");
    }
    const auto status = [&] { return receives ? mine->test(1).status() : mine->check(1); };
    EXPECT_EQ(firstError(1.2, status).message(), "");
    peer.signal(SIGKILL);
    const Clock::time_point killed = Clock::now();
    EXPECT_EQ(firstError(10, status).message().find("the connection to rank 1 is lost: "), 0u);
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - killed).count(), 4); // on a loaded machine
  }
}

// What a peer has sent before it ends is received, also if the receive is posted later.
TEST_P(UcxPeers, AMessageOfAKilledPeerIsReceived) {
  const Peer peer(folder.path());
  const Process mine(folder.path(), 0);
  EXPECT_EQ(firstError(1.2, [&] { return mine->check(1); }).message(), ""); // its message arrives
  peer.signal(SIGKILL);
  EXPECT_NE(firstError(10, [&] { return mine->check(1); }).message(), "");
  uint64_t value = 0;
  EXPECT_EQ(mine->receive(0, 1, kFirst, reinterpret_cast<std::byte *>(&value), sizeof value).message(), "");
  EXPECT_EQ(mine.wait(0).message(), "");
  EXPECT_EQ(value, 11u);
  EXPECT_NE(mine->receive(0, 1, kAnswer, reinterpret_cast<std::byte *>(&value), sizeof value).message(), "");
}

TEST_P(UcxPeers, AStoppedPeerIsNotLost) {
  const Peer peer(folder.path());
  const Process mine(folder.path(), 0);
  uint64_t value = 0, question = 5;
  const auto data = reinterpret_cast<std::byte *>(&value);
  EXPECT_EQ(mine->receive(0, 1, kFirst, data, sizeof value).message(), "");
  ASSERT_EQ(mine.wait(0).message(), "");
  peer.signal(SIGSTOP);
  EXPECT_EQ(mine->receive(1, 1, kAnswer, data, sizeof value).message(), "");
  EXPECT_EQ(firstError(4, [&] { return mine->test(1).status(); }).message(), "");
  peer.signal(SIGCONT);
  EXPECT_EQ(mine->send(2, 1, kQuestion, reinterpret_cast<std::byte *>(&question), sizeof question).message(), "");
  EXPECT_EQ(mine.wait(2).message(), "");
  EXPECT_EQ(mine.wait(1).message(), "");
  EXPECT_EQ(value, 5u);
}

} // namespace
