// SPDX-License-Identifier: Apache-2.0
// The channel of transport `ucx`, and plans over it, with all ranks as threads of this process. Each case runs over TCP
// and over UCX's choice for processes of one host.

#include "executor/interfaces/channel.h"
#include "executor/transports/transport.h"
#include "tests/executor/ranks.h"
#include "tests/executor/ucx_case.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include <dlfcn.h>
#include <sys/epoll.h>

using namespace reshard;
using tests::bytesOf;
using tests::onThreads;

namespace {

using Clock = std::chrono::steady_clock;

const Status kReason = failed("of the test");

/// Where the ranks of a job, threads of this process, meet.
struct Meeting {
  explicit Meeting(uint32_t ranks, uint64_t number = 1) : size(ranks), session(number) {}

  const uint32_t size;
  const uint64_t session;
  std::mutex mutex;
  std::condition_variable joined;
  std::map<uint32_t, std::string> hellos;
};

class FakeRendezvous : public Rendezvous {
public:
  FakeRendezvous(Meeting &meeting, uint32_t rank) : meeting_(meeting), rank_(rank) {}
  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return meeting_.size; }
  Status join(std::string_view hello, const Deadline &deadline) override {
    std::unique_lock lock(meeting_.mutex);
    meeting_.hellos[rank_] = hello;
    meeting_.joined.notify_all();
    const bool all = meeting_.joined.wait_until(lock, deadline.value_or(Clock::now() + std::chrono::hours(1)),
                                                [&] { return meeting_.hellos.size() == meeting_.size; });
    return all ? Status() : timedOut("not all ranks have joined");
  }
  Result<std::string> hello(uint32_t rank, const Deadline &) override {
    const std::lock_guard lock(meeting_.mutex);
    return meeting_.hellos.at(rank);
  }
  uint64_t session() const override { return meeting_.session; }

private:
  Meeting &meeting_;
  const uint32_t rank_;
};

/// A rank's channel. It closes before its rendezvous.
struct Rank {
  Rank(Meeting &meeting, uint32_t rank, size_t requests = 8) : rendezvous(meeting, rank) {
    Result<std::unique_ptr<Channel>> opened = openChannel("ucx", {.seconds = 20, .rendezvous = &rendezvous});
    EXPECT_EQ(opened.status().message(), "");
    if (!opened.ok())
      return;
    channel = std::move(*opened);
    channel->reserve(requests);
  }
  Status wait(size_t request, double seconds = 20) const { return tests::waitFor(*channel, request, seconds); }
  /// Begins a message of rank 0 to rank 1, of which this is one, as request 0.
  void begin(uint32_t tag, std::byte *data, uint64_t bytes) const {
    const Status status =
        channel->rank() == 0 ? channel->send(0, 1, tag, data, bytes) : channel->receive(0, 0, tag, data, bytes);
    EXPECT_EQ(status.message(), "");
  }
  /// The same, until it has arrived.
  Status exchange(uint32_t tag, std::byte *data, uint64_t bytes) const {
    begin(tag, data, bytes);
    return wait(0);
  }
  /// A first message of a byte connects the two ranks.
  void connectBoth() const {
    std::byte value{};
    EXPECT_EQ(exchange(0, &value, 1).message(), "");
  }
  Channel *operator->() const { return channel.get(); }

  FakeRendezvous rendezvous;
  std::unique_ptr<Channel> channel;
};

size_t openFiles() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

/// Is called before UCX looks for events of sockets on this thread.
thread_local std::function<void()> beforeEvents;

class Ucx : public tests::UcxCase {};

INSTANTIATE_TEST_SUITE_P(Over, Ucx, testing::Values("", "tcp"),
                         [](const auto &each) { return *each.param ? std::string(each.param) : std::string("any"); });

TEST_P(Ucx, MessagesOfAllSizesArriveInBothDirectionsAtOnce) {
  const std::vector<size_t> sizes = {0, 1, 8, 2048, 2049, 4096, 1 << 16, 1 << 20, 5'000'001};
  for (const bool registered : {false, true}) {
    SCOPED_TRACE(registered);
    Meeting meeting(3);
    onThreads(3, [&](uint32_t rank) {
      const Rank mine(meeting, rank, 4);
      std::vector<std::byte> in[2], out[2]; // by peer
      for (auto *each : {&in[0], &in[1], &out[0], &out[1]}) {
        each->resize(sizes.back());
        if (registered) {
          EXPECT_EQ(mine->registerMemory(each->data(), each->size()).message(), "");
        }
      }
      for (const size_t size : sizes) {
        for (const uint32_t p : {0u, 1u}) {
          const uint32_t peer = (rank + 1 + p) % 3;
          std::fill(in[p].begin(), in[p].end(), std::byte{9});
          const std::vector<std::byte> values = bytesOf(size + rank * 3 + peer, size);
          std::copy(values.begin(), values.end(), out[p].begin());
          EXPECT_EQ(mine->receive(p, peer, 7, in[p].data(), size).message(), "");
        }
        for (const uint32_t p : {0u, 1u})
          EXPECT_EQ(mine->send(2 + p, (rank + 1 + p) % 3, 7, out[p].data(), size).message(), "");
        for (size_t request = 0; request < 4; ++request)
          EXPECT_EQ(mine.wait(request).message(), "");
        for (const uint32_t p : {0u, 1u}) {
          const uint32_t peer = (rank + 1 + p) % 3;
          EXPECT_TRUE(std::equal(in[p].begin(), in[p].begin() + static_cast<ptrdiff_t>(size),
                                 bytesOf(size + peer * 3 + rank, size).begin()))
              << size << " bytes from rank " << peer;
          EXPECT_TRUE(size == sizes.back() || in[p][size] == std::byte{9}) << "writes behind a message";
        }
      }
    });
  }
}

// Short and long messages mixed, so that those sent with data may overtake announced ones.
TEST_P(Ucx, MessagesOfOneTagArriveInOrder) {
  constexpr uint32_t kMessages = 300, kTags = 5;
  Meeting meeting(2);
  const auto sizeOf = [](uint32_t message) { return std::array<size_t, 4>{8, 70'000, 0, 1500}[message % 4]; };
  onThreads(2, [&](uint32_t rank) {
    const Rank mine(meeting, rank, kMessages);
    std::vector<std::vector<std::byte>> data(kMessages);
    std::mt19937 random(5);
    std::vector<uint32_t> order;
    for (uint32_t tag = 0; tag < kTags; ++tag)
      for (uint32_t message = tag; message < kMessages; message += kTags)
        order.push_back(message);
    // The receiver posts tag by tag, half of it late: many messages arrive before their receive.
    for (uint32_t n = 0; n < kMessages; ++n) {
      const uint32_t message = rank == 0 ? n : order[n];
      data[message] = rank == 0 ? bytesOf(message, sizeOf(message)) : std::vector<std::byte>(sizeOf(message));
      const Status status =
          rank == 0 ? mine->send(message, 1, message % kTags, data[message].data(), data[message].size())
                    : mine->receive(message, 0, message % kTags, data[message].data(), data[message].size());
      EXPECT_EQ(status.message(), "");
      if (rank == 1 && random() % 16 == 0) {
        EXPECT_TRUE(mine->test(order[0]).ok());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    for (uint32_t message = 0; message < kMessages; ++message) {
      EXPECT_EQ(mine.wait(message).message(), "");
      if (rank == 1) {
        EXPECT_TRUE(data[message] == bytesOf(message, sizeOf(message))) << "message " << message;
      }
    }
  });
}

// A sender that is far ahead must not fill the memory of the receiver, and must complete when the receiver catches up.
TEST_P(Ucx, ASenderIsAheadByAFewShortMessages) {
  constexpr uint32_t kMessages = 2000;
  Meeting meeting(2);
  std::atomic<uint32_t> sent = 0;
  onThreads(2, [&](uint32_t rank) {
    const Rank mine(meeting, rank);
    for (uint32_t n = 0; n < kMessages; ++n) {
      if (rank == 1 && n == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        EXPECT_LE(sent, 16u);
      }
      uint32_t value = rank == 0 ? n : ~n;
      ASSERT_EQ(mine.exchange(1, reinterpret_cast<std::byte *>(&value), sizeof value).message(), "");
      EXPECT_EQ(value, n);
      sent += rank == 0;
    }
  });
}

TEST_P(Ucx, AThousandRoundsDoNotGrow) {
  Meeting meeting(4);
  std::atomic<size_t> files = 0;
  onThreads(4, [&](uint32_t rank) {
    const Rank mine(meeting, rank, 12);
    std::vector<std::byte> out = bytesOf(rank, 20'000), in(6 * out.size());
    EXPECT_EQ(mine->registerMemory(in.data(), in.size()).message(), "");
    if (rank % 2 == 0) { // receivers read it; else UCX's rendezvous moves it
      EXPECT_EQ(mine->registerMemory(out.data(), out.size()).message(), "");
    }
    for (uint32_t round = 0; round < 1000; ++round) {
      if (round == 100 && rank == 0)
        files = openFiles();
      for (uint32_t p = 0; p < 3; ++p)
        for (const uint32_t kind : {0u, 1u}) { // short and long
          const uint32_t peer = (rank + 1 + p) % 4;
          const size_t bytes = kind ? out.size() : 24, request = 2 * p + kind;
          EXPECT_EQ(mine->receive(request, peer, 10 + kind, in.data() + request * out.size(), bytes).message(), "");
          EXPECT_EQ(mine->send(6 + request, peer, 10 + kind, out.data(), bytes).message(), "");
        }
      for (size_t request = 0; request < 12; ++request)
        ASSERT_EQ(mine.wait(request).message(), "") << "round " << round;
    }
    // UCX opens and closes a few connections at times of its own. A descriptor for each round would be 900.
    if (rank == 0) {
      EXPECT_LT(openFiles(), files + 20);
    }
  });
}

// Other ranks may still wait for the last messages of a rank that closes its channel.
TEST_P(Ucx, ClosingDoesNotLoseTheLastMessages) {
  for (uint32_t round = 0; round < 20; ++round) {
    Meeting meeting(3);
    onThreads(3, [&](uint32_t rank) {
      const Rank mine(meeting, rank);
      uint64_t out = rank, in[2] = {};
      for (const uint32_t p : {0u, 1u}) {
        const uint32_t peer = (rank + 1 + p) % 3;
        EXPECT_EQ(mine->receive(p, peer, 0, reinterpret_cast<std::byte *>(&in[p]), sizeof out).message(), "");
        EXPECT_EQ(mine->send(2 + p, peer, 0, reinterpret_cast<const std::byte *>(&out), sizeof out).message(), "");
      }
      if (rank == round % 3)
        std::this_thread::sleep_for(std::chrono::milliseconds(round % 7));
      for (size_t request = 0; request < 4; ++request)
        EXPECT_EQ(mine.wait(request).message(), "") << "rank " << rank << " round " << round;
      for (const uint32_t p : {0u, 1u})
        EXPECT_EQ(in[p], (rank + 1 + p) % 3);
    });
  }
}

// An engine that has received its weights may leave, while the trainer computes and calls nothing of UCX.
TEST_P(Ucx, ClosingDoesNotWaitForAnIdlePeer) {
  Meeting meeting(2);
  std::promise<void> closed;
  onThreads(2, [&](uint32_t rank) {
    auto mine = std::make_unique<Rank>(meeting, rank);
    std::vector<std::byte> data = bytesOf(rank, 1 << 17);
    EXPECT_EQ((*mine)->registerMemory(data.data(), data.size()).message(), "");
    EXPECT_EQ(mine->exchange(0, data.data(), data.size()).message(), "");
    EXPECT_EQ(data, bytesOf(0, data.size()));
    if (rank == 0) {
      closed.get_future().wait();
      return;
    }
    const auto begin = Clock::now();
    mine.reset();
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10)); // below the 20 s that a rank joins
    closed.set_value();
  });
}

TEST_P(Ucx, RefusesWrongArguments) {
  Meeting meeting(1);
  const Rank alone(meeting, 0);
  std::byte data{};
  EXPECT_NE(alone->send(0, 0, 0, &data, kMaxChannelBytes + 1).message().find("expected at most 1073741824 bytes"),
            std::string::npos);
  EXPECT_NE(alone->send(0, 1, 0, &data, 1).message().find("a rank below 1"), std::string::npos);
  EXPECT_NE(alone->receive(0, 0, 1u << 31, &data, 1).message().find("a tag of at most"), std::string::npos);
  EXPECT_TRUE(*alone->test(0));
  const Result<std::unique_ptr<Channel>> without = openChannel("ucx", {});
  EXPECT_EQ(without.status().message(),
            "backend 'ucx': transport 'ucx' needs a rendezvous, by which the processes find each other");
}

TEST_P(Ucx, NamesAFolderWithoutUcx) {
  ::setenv("RESHARD_UCX_ROOT", "/nowhere", 1);
  const Status status = openChannel("ucx", {}).status();
  ::unsetenv("RESHARD_UCX_ROOT");
  EXPECT_EQ(status.message().find("backend 'ucx': RESHARD_UCX_ROOT=/nowhere: "), 0u) << status.message();
}

TEST_P(Ucx, RunsPlans) {
  std::vector<std::string> jobs = tests::relayJobs();
  jobs.push_back(tests::kUnevenJobs[1]);
  for (const std::string &job : jobs) {
    SCOPED_TRACE(job);
    const std::unique_ptr<Plan> plan = tests::compiledPlan(job);
    const tests::Ranks sent = tests::fillRanks(*plan, 0);
    std::vector<std::unique_ptr<FakeRendezvous>> rendezvous;
    std::vector<std::unique_ptr<Transport>> transports(plan->world());
    Meeting meeting(plan->world());
    for (uint32_t rank = 0; rank < plan->world(); ++rank)
      rendezvous.push_back(std::make_unique<FakeRendezvous>(meeting, rank));
    onThreads(plan->world(), [&](uint32_t rank) {
      Result<std::unique_ptr<Channel>> channel =
          openChannel("ucx", {.seconds = 60, .rendezvous = rendezvous[rank].get()});
      ASSERT_EQ(channel.status().message(), "");
      transports[rank] = makeMessageTransport(std::move(*channel), false);
      EXPECT_EQ(transports[rank]->prepare(*plan, {sent[rank]->local}, deadlineIn(60)).message(), "");
    });
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      onThreads(plan->world(), [&](uint32_t rank) {
        sent[rank]->fill(seed);
        EXPECT_EQ(transports[rank]->run(deadlineIn(60)).message(), "") << "rank " << rank << " run " << seed;
      });
      SCOPED_TRACE(seed);
      expectSame(tests::copied(*plan, seed), sent);
    }
    onThreads(plan->world(), [&](uint32_t rank) { transports[rank].reset(); });
  }
}

// The arena and bound memory are the caller's when a run has failed, and the same processes run the plan again.
TEST_P(Ucx, APlanIsOpenedAgainAfterAFailedRun) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(tests::kRelayJobs[1]);
  const tests::Ranks sent = tests::fillRanks(*plan, 0), expected = tests::copied(*plan, 5);
  for (const uint64_t attempt : {0, 1, 2}) { // the last one succeeds
    Meeting meeting(plan->world(), attempt);
    onThreads(plan->world(), [&](uint32_t rank) {
      FakeRendezvous rendezvous(meeting, rank);
      Result<std::unique_ptr<Channel>> channel = openChannel("ucx", {.seconds = 60, .rendezvous = &rendezvous});
      ASSERT_EQ(channel.status().message(), "");
      const std::unique_ptr<Transport> transport = makeMessageTransport(std::move(*channel), false);
      EXPECT_EQ(transport->prepare(*plan, {sent[rank]->local}, deadlineIn(60)).message(), "");
      sent[rank]->fill(5);
      if (attempt < 2 && rank == plan->world() - 1) { // does not run; in the second attempt it goes at once
        std::this_thread::sleep_for(std::chrono::milliseconds(attempt == 0 ? 500 : 0));
        return;
      }
      const Status status = transport->run(deadlineIn(attempt < 2 ? 0.2 : 60));
      EXPECT_EQ(status.ok(), attempt == 2) << status.message();
      if (attempt < 2) {
        EXPECT_EQ(transport->run({}).message(),
                  "an earlier run failed with messages in flight; open the plan again in all processes");
      }
    });
  }
  expectSame(expected, sent);
}

TEST_P(Ucx, AMessageOfAnotherSizeIsAnError) {
  for (const auto &sizes :
       std::vector<std::pair<size_t, size_t>>{{8, 16}, {8, 100'000}, {100'000, 8}, {100'000, 50'000}}) {
    Meeting meeting(2);
    std::atomic<bool> failed = false;
    onThreads(2, [&](uint32_t rank) {
      const Rank mine(meeting, rank);
      std::vector<std::byte> data(100'000);
      if (rank == 0) {
        EXPECT_EQ(mine->send(0, 1, 3, data.data(), sizes.first).message(), "");
        while (!failed)
          EXPECT_TRUE(mine->test(0).ok());
      } else {
        EXPECT_EQ(mine->receive(0, 0, 3, data.data(), sizes.second).message(), "");
        EXPECT_EQ(mine.wait(0).message(), "received a message of " + std::to_string(sizes.first) +
                                              " bytes from rank 0, expected " + std::to_string(sizes.second));
        failed = true;
      }
    });
  }
}

// A process with another transport, or of another version, may join the same rendezvous.
TEST_P(Ucx, APeerWithAnotherTransportIsAnError) {
  const auto another = [](std::string hello) { return tests::sealed(hello.replace(0, 7, "another")); };
  const auto damaged = [](std::string hello) { return hello.replace(hello.size() - 1, 1, 1, hello.back() ^ 1); };
  for (const auto &change : std::vector<std::function<std::string(std::string)>>{another, damaged}) {
    Meeting meeting(2);
    std::promise<void> notified;
    onThreads(2, [&](uint32_t rank) {
      const Rank mine(meeting, rank);
      if (rank == 1) {
        notified.get_future().wait();
        return;
      }
      {
        const std::lock_guard lock(meeting.mutex);
        meeting.hellos.at(1) = change(meeting.hellos.at(1));
      }
      std::byte data[8]{};
      EXPECT_EQ(mine->send(0, 1, 1, data, sizeof data).message(),
                "rank 1 has another transport or version of reshard: expected that its hello begins with "
                "'reshard-ucx-1:'");
      notified.set_value();
    });
  }
}

TEST_P(Ucx, APeerThatHasGoneIsNamed) {
  Meeting meeting(2);
  onThreads(2, [&](uint32_t rank) {
    auto mine = std::make_unique<Rank>(meeting, rank);
    std::vector<std::byte> data(1 << 20);
    mine->connectBoth();
    if (rank == 1) {
      EXPECT_TRUE((*mine)->abandon(kReason));
      return;
    }
    EXPECT_EQ((*mine)->receive(1, 1, 1, data.data(), data.size()).message(), "");
    EXPECT_EQ(mine->wait(1, 10).message(), "rank 1 has failed: of the test");
    const Status status = (*mine)->send(2, 1, 1, data.data(), data.size());
    EXPECT_EQ(status.message(), "rank 1 has failed: of the test");
  });
}

// The ranks fail one after the other, each because of the one before it. All name the first and its reason.
TEST_P(Ucx, AllNameTheRankThatFailedFirst) {
  constexpr uint32_t kRanks = 4;
  Meeting meeting(kRanks);
  std::vector<std::string> errors(kRanks);
  onThreads(kRanks, [&](uint32_t rank) {
    const Rank mine(meeting, rank);
    uint64_t in = 0, out = rank;
    const auto message = [&](uint32_t tag) {
      if (rank > 0) {
        EXPECT_EQ(mine->receive(0, rank - 1, tag, reinterpret_cast<std::byte *>(&in), sizeof in).message(), "");
      }
      if (rank + 1 < kRanks && tag == 0) {
        EXPECT_EQ(mine->send(1, rank + 1, tag, reinterpret_cast<std::byte *>(&out), sizeof out).message(), "");
      }
    };
    message(0); // connects them
    EXPECT_EQ(mine.wait(0).message(), "");
    EXPECT_EQ(mine.wait(1).message(), "");
    Status error = failed("the disk is full");
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    } else {
      message(1);
      error = mine.wait(0);
    }
    errors[rank] = error.message();
    EXPECT_TRUE(mine->abandon(error));
  });
  EXPECT_EQ(errors[1], "rank 0 has failed: the disk is full");
  EXPECT_EQ(errors[2], "rank 0 has failed: the disk is full; rank 1, for which this rank waits, failed because of it");
  EXPECT_EQ(errors[3], "rank 0 has failed: the disk is full; rank 2, for which this rank waits, failed because of it");
}

// A peer that does not read does not delay abandon().
TEST_P(Ucx, APeerThatDoesNotAnswerDelaysNobody) {
  Meeting meeting(2);
  std::atomic<bool> ended = false;
  onThreads(2, [&](uint32_t rank) {
    const Rank mine(meeting, rank, 40);
    std::vector<std::byte> data(1 << 20);
    if (rank == 1) { // makes no progress
      std::byte value{};
      EXPECT_EQ(mine->receive(0, 0, 0, &value, 1).message(), "");
      EXPECT_EQ(mine.wait(0).message(), "");
      while (!ended)
        std::this_thread::yield();
      return;
    }
    for (uint32_t request = 0; request < 40; ++request)
      EXPECT_EQ(mine->send(request, 1, 0, data.data(), request == 0 ? 1 : data.size()).message(), "");
    EXPECT_EQ(mine.wait(0).message(), "");
    const Clock::time_point begin = Clock::now();
    EXPECT_TRUE(mine->abandon(kReason));
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 1.5);
    ended = true;
  });
}

// After abandon() the memory is the caller's: the peer completes its send, or fails, and nothing arrives. The same
// process can open a channel again.
TEST_P(Ucx, AbandonedMemoryIsNotWrittenAndTheProcessCanStartAgain) {
  size_t files = 0;
  for (uint64_t round = 0; round < 6; ++round) {
    Meeting meeting(2, round);
    onThreads(2, [&](uint32_t rank) {
      const Rank mine(meeting, rank);
      mine.connectBoth();
      std::vector<std::byte> data(32 << 20, std::byte{1});
      if (round % 2 == 0) { // then the receiver reads it, else UCX's rendezvous moves it
        EXPECT_EQ(mine->registerMemory(data.data(), data.size()).message(), "");
      }
      mine.begin(0, data.data(), data.size());
      if (rank == 0) {
        const Deadline deadline = deadlineIn(0.3); // the peer goes in the middle, and is then detected or not
        while (!passed(deadline) && mine->test(0).ok()) {
        }
        EXPECT_TRUE(mine->abandon(kReason));
        return;
      }
      for (uint64_t polls = 0; polls < 40 * round && mine->test(0).ok();
           ++polls) { // on a slow machine the peer is first
      }
      EXPECT_TRUE(mine->abandon(kReason));
      std::fill(data.begin(), data.end(), std::byte{2});
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(std::count(data.begin(), data.end(), std::byte{2}), 32 << 20);
      EXPECT_NE(mine->send(1, 0, 0, data.data(), 1).message(), "");
      EXPECT_FALSE(mine->test(0).ok());
    });
    if (round == 1)
      files = openFiles();
  }
  EXPECT_EQ(openFiles(), files);
}

// A peer that ends while this process closes the connection, with unsent data in the socket: UCX uses the connection
// after it has freed it if one look at the socket finds both space and the end of the peer's connection.
TEST_P(Ucx, APeerEndsWhileThisProcessCloses) {
  constexpr double kSeconds = 20;
  Meeting meeting(2);
  std::promise<void> closing, ended;
  onThreads(2, [&](uint32_t rank) {
    const Rank mine(meeting, rank);
    mine.connectBoth();
    std::vector<std::byte> data(32 << 20, std::byte(1 - rank));
    mine.begin(0, data.data(), data.size());
    if (rank == 1) {
      for (const Deadline deadline = deadlineIn(kSeconds); data[0] == std::byte{0} && !passed(deadline);)
        if (const auto done = mine->test(0); !done.ok()) {
          ADD_FAILURE() << done.status().message();
          break;
        }
      EXPECT_EQ(data[0], std::byte{1});
      // The peer fills the socket, and closes.
      EXPECT_EQ(closing.get_future().wait_for(std::chrono::duration<double>(kSeconds)), std::future_status::ready);
      EXPECT_TRUE(mine->abandon(kReason));
      ended.set_value();
      return;
    }
    for (const Deadline filled = deadlineIn(0.2); !passed(filled);)
      EXPECT_TRUE(mine->test(0).ok());
    bool notified = false;
    const auto letPeerEnd = [&] {
      if (!std::exchange(notified, true)) {
        closing.set_value();
        EXPECT_EQ(ended.get_future().wait_for(std::chrono::duration<double>(kSeconds)), std::future_status::ready);
      }
    };
    // abandon() first tries for 0.2 s to tell the peer, which receives nothing. Then it closes.
    const Deadline closes = deadlineIn(0.2005);
    size_t looks = 0;
    beforeEvents = [&] {
      ++looks;
      if (passed(closes))
        letPeerEnd();
    };
    EXPECT_TRUE(mine->abandon(kReason));
    beforeEvents = nullptr;
    EXPECT_GT(looks, 0u); // UCX calls this file's epoll_wait
    letPeerEnd();
  });
}

TEST_P(Ucx, AMessageOfAnotherSessionIsDropped) {
  Meeting meeting(2, 1), strange(2, 2);
  std::atomic<bool> received{false};
  onThreads(3, [&](uint32_t thread) {
    if (thread < 2) { // the job
      const Rank mine(meeting, thread);
      uint64_t value = thread == 0 ? 11 : 0;
      const auto data = reinterpret_cast<std::byte *>(&value);
      if (thread == 1) {
        EXPECT_EQ(mine->receive(0, 0, 4, data, sizeof value).message(), "");
        EXPECT_EQ(mine.wait(0, 0.3).timedOut(), true); // while the stranger sends
        EXPECT_EQ(value, 0u);
        EXPECT_EQ(mine.wait(0).message(), "");
        EXPECT_EQ(value, 11u);
        received = true;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        EXPECT_EQ(mine.exchange(4, data, sizeof value).message(), "");
      }
      return;
    }
    { // as rank 0 of another job, at the address of rank 1 of this one
      std::unique_lock lock(meeting.mutex);
      meeting.joined.wait(lock, [&] { return meeting.hellos.size() == 2; });
      const std::lock_guard other(strange.mutex);
      strange.hellos[1] = meeting.hellos[1];
    }
    const Rank stranger(strange, 0);
    std::vector<std::byte> garbage(50'000, std::byte{5});
    EXPECT_EQ(stranger->send(0, 1, 4, garbage.data(), 8).message(), "");
    EXPECT_EQ(stranger->send(1, 1, 4, garbage.data(), garbage.size()).message(), "");
    // UCX before 1.14 aborts the process of rank 1 if the stranger leaves while rank 1 sets up the connection
    // (https://github.com/openucx/ucx/pull/8175).
    for (const Deadline deadline = deadlineIn(30); !received && !passed(deadline);)
      (void)stranger.wait(1, 0.05);
  });
}

} // namespace

/// In place of the C library's: UCX calls this one.
extern "C" int epoll_wait(int set, epoll_event *events, int most, int milliseconds) {
  static const auto real = reinterpret_cast<decltype(&epoll_wait)>(::dlsym(RTLD_NEXT, "epoll_wait"));
  if (beforeEvents)
    beforeEvents();
  return real(set, events, most, milliseconds);
}
