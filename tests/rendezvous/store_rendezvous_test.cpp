// SPDX-License-Identifier: Apache-2.0
// Processes of a job, as threads, that join in any order, again, twice, with other plans, secrets and versions.

#include "executor/rendezvous/store_rendezvous.h"
#include "executor/rendezvous/tcp_server.h"
#include "executor/rendezvous/url.h"
#include "tests/lib/threads.h"
#include "tests/rendezvous/support.h"

#include <random>
#include <thread>

namespace reshard {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;
using tests::in;
using tests::Memory;
using tests::MemoryStore;
using tests::secret;

const std::string kPlan(32, 'a'), kOther(32, 'b');

/// One process of a job of `size` processes.
struct Process {
  JobOptions options;
  int delay = 0, deadline = 20'000; // milliseconds
  std::function<Result<std::unique_ptr<Store>>()> store;
  std::shared_ptr<Store> opened; // kept, since rank 0's serves the others
  Status result;
  uint64_t session = 0;
  std::vector<std::string> hellos;

  void run() {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    const Deadline until = in(deadline);
    Result<std::unique_ptr<Store>> opening = store();
    result = opening.status();
    if (!result.ok())
      return;
    opened = std::move(*opening);
    StoreRendezvous job(*opened, options);
    result = job.join("hello of " + std::to_string(options.rank), until);
    if (!result.ok())
      return;
    session = job.session();
    for (uint32_t rank = 0; rank < options.size && result.ok(); ++rank) {
      const Result<std::string> hello = job.hello(rank, in(10'000));
      result = hello.status();
      hellos.push_back(hello.ok() ? *hello : "");
    }
  }
};

/// The processes of a job with a store in memory.
class StoreRendezvousTest : public testing::Test {
public:
  std::vector<Process> processes(uint32_t size) {
    std::vector<Process> all(size);
    for (uint32_t rank = 0; rank < size; ++rank) {
      all[rank].options = {"job", kPlan, rank, size, {}};
      all[rank].store = [this]() -> Result<std::unique_ptr<Store>> { return {std::make_unique<MemoryStore>(memory)}; };
    }
    return all;
  }

  static void run(std::vector<Process> &all) {
    tests::onThreads(all.size(), [&](uint32_t number) { all[number].run(); });
  }

  static void expectJoined(const std::vector<Process> &all) {
    for (const Process &each : all) {
      EXPECT_EQ(each.result.message(), "") << each.options.rank;
      EXPECT_NE(each.session, 0u);
      EXPECT_EQ(each.session, all[0].session);
      for (uint32_t rank = 0; rank < each.hellos.size(); ++rank)
        EXPECT_EQ(each.hellos[rank], "hello of " + std::to_string(rank));
    }
  }

  /// Without joining, sets what a process that was killed has left.
  void leave(uint32_t rank, uint64_t token, const Authenticator &authenticator = {}) {
    Hello hello;
    hello.library = RESHARD_VERSION;
    hello.token = token;
    hello.host = "elsewhere";
    hello.process = 1;
    const std::string key = "reshard/job/" + kPlan + "/hello/" + std::to_string(rank);
    memory.values[key] = seal(authenticator, key, hello.encode());
  }

  Memory memory;
};

} // namespace

TEST_F(StoreRendezvousTest, JoinsInAnyOrderOverAnyStore) {
  std::mt19937 random(1);
  const tests::TemporaryFolder folder;
  uint16_t port = 0;
  {
    port = (*TcpServer::serve({{"127.0.0.1", 0}, {}, false}, {}, {}))->port();
  }
  for (const std::string &url : {std::string(), "file://" + folder.path(), "tcp://127.0.0.1:" + std::to_string(port)})
    for (const char *word : {"", "secret"}) {
      std::vector<Process> all = processes(9);
      for (Process &each : all) {
        each.options.authenticator = secret(word);
        each.delay = static_cast<int>(random() % 100);
        if (!url.empty())
          each.store = [&each, url] {
            return openStore({url, each.options.rank == 0, each.options.authenticator, false}, in(20'000));
          };
      }
      run(all);
      expectJoined(all);
    }
}

TEST_F(StoreRendezvousTest, OneProcess) {
  std::vector<Process> all = processes(1);
  run(all);
  expectJoined(all);
}

TEST_F(StoreRendezvousTest, ManyProcesses) {
  std::vector<Process> all = processes(200);
  for (Process &each : all)
    each.delay = static_cast<int>(each.options.rank * 7 % 50);
  run(all);
  expectJoined(all);
}

TEST_F(StoreRendezvousTest, JobsAndPlansDoNotMeet) {
  std::vector<Process> all = processes(6);
  for (uint32_t i = 0; i < 6; ++i) {
    all[i].options.rank = i % 2;
    all[i].options.size = 2;
    all[i].options.name = i < 2 ? "a/b" : "a_b";
    all[i].options.plan = i < 4 ? kPlan : kOther;
  }
  run(all);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(all[i].result.message(), "");
    EXPECT_EQ(all[i].session == all[i ^ 1].session, true);
  }
  EXPECT_NE(all[0].session, all[2].session);
  EXPECT_NE(all[2].session, all[4].session);
}

TEST_F(StoreRendezvousTest, JoinsAgainOverTheKeysOfEarlierAttempts) {
  std::vector<Process> first = processes(4);
  run(first); // one that succeeded
  std::vector<Process> alone = processes(4);
  alone.resize(2);
  for (Process &each : alone)
    each.deadline = 150;
  run(alone); // one in which ranks 2 and 3 did not join
  for (const Process &each : alone)
    EXPECT_TRUE(each.result.timedOut()) << each.result.message();
  leave(3, 77); // one that was killed
  leave(2, 78, secret("another"));
  memory.values["reshard/job/" + kPlan + "/roster"] = "garbage";
  memory.values["reshard/job/" + kPlan + "/welcome/1"] = std::string("\x72\x73\x68\x64\xff\xff\xff\xff", 8);
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::vector<Process> all = processes(4);
    for (Process &each : all)
      each.delay = each.options.rank == 3 ? 100 : 0; // rank 0 reads the hello of the earlier rank 3 first
    run(all);
    expectJoined(all);
    EXPECT_NE(all[0].session, first[0].session);
  }
}

TEST_F(StoreRendezvousTest, ARankThatRestartsJoins) {
  // Rank 1 ends after its answer, while rank 2 has not joined.
  std::vector<Process> all = processes(3);
  all[2].delay = 500;
  std::thread restarting([&] {
    MemoryStore store(memory);
    StoreRendezvous lost(store, all[1].options);
    EXPECT_TRUE(lost.join("old", in(200)).timedOut());
    all[1].run();
  });
  std::thread zero([&] { all[0].run(); }), two([&] { all[2].run(); });
  for (std::thread *each : {&restarting, &zero, &two})
    each->join();
  expectJoined(all);
}

TEST_F(StoreRendezvousTest, MissingRanksAreNamed) {
  std::vector<Process> all = processes(12);
  all.resize(2);
  leave(5, 7);
  for (Process &each : all)
    each.deadline = 400;
  run(all);
  for (const Process &each : all) {
    EXPECT_TRUE(each.result.timedOut());
    EXPECT_EQ(each.result.message(),
              "timed out: rank 2 has not joined; rank 3 has not joined; rank 4 has not joined; rank 5 (process 1 on "
              "host elsewhere) has said hello, but does not answer; rank 6 has not joined; rank 7 has not joined; rank "
              "8 has not joined; rank 9 has not joined; and 2 more");
  }
  std::vector<Process> orphan = processes(2);
  orphan.erase(orphan.begin());
  orphan[0].deadline = 100;
  run(orphan);
  EXPECT_THAT(orphan[0].result.message(), StartsWith("timed out: rank 0 has not joined; an attempt of other processes "
                                                     "has failed: timed out: rank 2 has not joined; "));
}

TEST_F(StoreRendezvousTest, AnotherPlanEndsAll) {
  // One rank has another plan; rank 0 has another one; the other plan has more ranks. Most have no deadline.
  for (const uint32_t other : {2u, 0u, 3u}) {
    SCOPED_TRACE(other);
    memory.values.clear();
    std::vector<Process> all = processes(3);
    if (other == 3) {
      all = processes(5);
      for (uint32_t rank = 0; rank < 5; ++rank)
        all[rank].options.size = rank == 0 ? 3 : 5;
    }
    for (Process &each : all) {
      each.deadline = 30'000;
      if (each.options.rank == other || (other == 3 && each.options.rank > 0))
        each.options.plan = kOther;
    }
    const auto begin = std::chrono::steady_clock::now();
    run(all);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    // If several have another plan, rank 0 names the one whose note it has seen first.
    const bool second = all[0].result.message().starts_with("rank 2 ");
    const std::string rank = other == 2 || second ? "2" : "1";
    for (const Process &each : all)
      EXPECT_EQ(each.result.message(), "rank " + rank + " has opened plan " + (other == 0 ? kPlan : kOther) +
                                           ", rank 0 has opened plan " + (other == 0 ? kOther : kPlan) +
                                           "; give the same plan file to all ranks");
  }
}

TEST_F(StoreRendezvousTest, RanksThatStartLaterAreToldToo) {
  // Rank 1 has another plan. Rank 2 starts after rank 0 has refused the job, with either plan; its hello may replace
  // that of an earlier attempt.
  for (const std::string &plan : {kPlan, kOther}) {
    for (const bool earlier : {false, true}) {
      memory.values.clear();
      if (earlier)
        leave(2, 7);
      std::vector<Process> all = processes(3);
      all[1].options.plan = kOther;
      all[2].options.plan = plan;
      all[2].delay = 2500;
      const auto begin = std::chrono::steady_clock::now();
      run(all);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
      for (const Process &each : all)
        EXPECT_THAT(each.result.message(), StartsWith("rank 1 has opened plan " + kOther + ", rank 0 has opened plan"));
    }
  }
  // Rank 0 does not wait longer for one that never starts.
  memory.values.clear();
  std::vector<Process> all = processes(3);
  all.pop_back();
  all[1].options.plan = kOther;
  const auto begin = std::chrono::steady_clock::now();
  run(all);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9));
}

TEST_F(StoreRendezvousTest, ARankThatFailsBeforeItJoinsEndsAll) {
  // Also with the hellos of an earlier attempt. It may know the number of ranks, and several may fail.
  for (const uint32_t failing : {2u, 0u}) {
    for (const uint32_t size : {0u, 3u}) {
      SCOPED_TRACE(testing::Message() << failing << " " << size);
      std::vector<Process> all = processes(3);
      all[failing].deadline = 1000;
      all[failing].store = [&, store = all[failing].store]() -> Result<std::unique_ptr<Store>> {
        reportFailure(**store(), {"job", "", failing, size, {}}, invalid("no plan"), in(20'000));
        return failed("no plan");
      };
      const auto begin = std::chrono::steady_clock::now();
      run(all);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(size == 0 && failing == 0 ? 8 : 4));
      for (const Process &each : all)
        if (each.options.rank != failing) {
          EXPECT_EQ(each.result.message(), "rank " + std::to_string(failing) + ": no plan");
          EXPECT_EQ(each.result.kind(), ErrorKind::invalid);
        }
    }
    std::vector<Process> all = processes(3); // what they have left does no harm
    all[1].delay = 1500;
    run(all);
    expectJoined(all);
  }
}

TEST_F(StoreRendezvousTest, AllRanksMayFailBeforeTheyJoin) {
  const auto begin = std::chrono::steady_clock::now();
  tests::onThreads(3, [&](uint32_t rank) {
    MemoryStore store(memory);
    reportFailure(store, {"job", "", rank, 3, {}}, failed("no plan"), in(20'000));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  MemoryStore store(memory); // nobody comes
  reportFailure(store, {"job", "", 1, 0, {}}, failed("no plan"), in(300));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST_F(StoreRendezvousTest, AnotherPlanOfAnEarlierAttemptEndsNobody) {
  // Rank 2 has had another plan, and found that of rank 0; both were killed. Then rank 2 starts late.
  std::vector<Process> earlier = processes(3);
  earlier[2].options.plan = kOther;
  for (Process &each : earlier)
    each.deadline = 300;
  run(earlier);
  std::vector<Process> all = processes(3);
  all[2].delay = 1500;
  run(all);
  expectJoined(all);
  // With a deadline that passes first, the other plan is named all the same.
  EXPECT_THAT(earlier[0].result.message(), HasSubstr("rank 2 has not joined (rank 2 has opened plan " + kOther));
  EXPECT_THAT(earlier[2].result.message(), HasSubstr("rank 2 has opened plan " + kOther));
}

TEST_F(StoreRendezvousTest, ARankZeroWithoutAStoreEndsTheOthers) {
  // They wait at the store of another job, which runs.
  std::vector<Process> running = processes(3);
  run(running);
  std::vector<Process> all = processes(3);
  std::thread zero([&] {
    MemoryStore store(memory);
    const auto begin = std::chrono::steady_clock::now();
    refuseJob(store, all[0].options, failed("the port is in use"), in(20'000));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  });
  all[2].delay = 300;
  std::vector<Process> others(all.begin() + 1, all.end());
  run(others);
  zero.join();
  for (const Process &each : others)
    EXPECT_EQ(each.result.message(), "the port is in use");
}

TEST_F(StoreRendezvousTest, ADuplicateRankIsNamedByAll) {
  for (const uint32_t twice : {0u, 1u, 2u}) {
    memory.values.clear();
    std::vector<Process> all = processes(4);
    all[3].delay = 500; // when it starts, rank 0 has refused the job
    all.push_back(all[twice]);
    all.back().delay = 100;
    run(all);
    for (const Process &each : all)
      EXPECT_THAT(each.result.message(),
                  MatchesRegex("two processes have joined as rank " + std::to_string(twice) +
                               ": process [0-9]+ on host .*, and process [0-9]+ on host .*; give each process its own "
                               "rank, and each job its own name"))
          << twice << " " << each.options.rank;
  }
}

TEST_F(StoreRendezvousTest, AnotherSecretIsNamedByAll) {
  for (const auto &[word, problem] :
       {std::pair("wrong", "was made with another secret"), std::pair("", "was made without a secret")}) {
    memory.values.clear();
    std::vector<Process> all = processes(3);
    for (Process &each : all)
      each.options.authenticator = secret("right");
    all[2].options.authenticator = secret(word);
    all[2].delay = 100; // a process that says hello after the refusal learns of it at its deadline
    run(all);
    for (const uint32_t rank : {0u, 1u})
      EXPECT_THAT(all[rank].result.message(),
                  MatchesRegex("the hello of rank 2 \\(process [0-9]+ on host .*\\) " + std::string(problem) +
                               "; give all processes the same secret \\(RESHARD_SECRET\\)"));
    EXPECT_THAT(all[2].result.message(), HasSubstr("the welcome of rank 0 was made with"));
  }
}

TEST_F(StoreRendezvousTest, AnotherReleaseIsNamedByAll) {
  // A process of a later release, which can do no more than set its hello, answer, and read the refusal.
  std::vector<Process> all = processes(3);
  all.pop_back();
  const std::string prefix = "reshard/job/" + kPlan + "/";
  std::string refusal;
  std::thread later([&] {
    MemoryStore store(memory);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const std::string key = prefix + "hello/2";
    Hello hello;
    hello.version = 9;
    hello.library = "7.0.0";
    hello.token = 5;
    hello.host = "a";
    hello.process = 3;
    ASSERT_TRUE(store.set(key, seal({}, key, hello.encode()), {}).ok());
    const auto valueOnceSet = [&](const std::string &name) {
      std::string value;
      for (const Deadline until = in(10'000); value.empty() && !passed(until);) {
        value = tests::valueOf(store, prefix + name);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return value;
    };
    const std::string welcome = valueOnceSet("welcome/2");
    ASSERT_NE(welcome, "");
    ASSERT_TRUE(
        store.set(prefix + "answer/2", seal({}, prefix + "answer/2", unseal({}, "", welcome)->record), {}).ok());
    refusal = valueOnceSet("roster");
    ASSERT_NE(refusal, "");
    ASSERT_TRUE(store.set(prefix + "answer/2", seal({}, prefix + "answer/2", Welcome{0, 5}.encode()), {}).ok());
  });
  run(all);
  later.join();
  EXPECT_THAT(all[0].result.message(), HasSubstr("rank 2 (process 3 on host a) runs reshard 7.0.0 with version 9"));
  EXPECT_EQ(all[0].result.message(), all[1].result.message());
  EXPECT_THAT(refusal, HasSubstr(all[0].result.message()));
}

TEST_F(StoreRendezvousTest, AStoreThatLosesAKeyFailsByTheDeadline) {
  const std::string silent = "timed out: rank 1 \\(process .*\\) has said hello, but does not answer";
  const std::string texts[][3] = {
      // the key, and the errors of ranks 0 and 1
      {"hello/1", "timed out: rank 1 has not joined", "timed out: rank 0 has not joined"},
      {"welcome/1", silent, silent},
      {"answer/1", silent, silent},
      {"roster", "$", "timed out: rank 0 has not completed the roster"},
      {"hello/0", "the hello of rank 0 is no longer in the store", "the hello of rank 0 is no longer in the store"}};
  for (const auto &[lost, first, second] : texts) {
    SCOPED_TRACE(lost);
    memory.values.clear();
    memory.keeps = [lost = lost](const std::string &key) { return !key.ends_with(lost); };
    std::vector<Process> all = processes(2);
    all[0].deadline = 300;
    all[1].deadline = 900; // later, so that it reads the refusal of rank 0 also on a loaded machine
    const auto begin = std::chrono::steady_clock::now();
    run(all);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
    EXPECT_THAT(all[0].result.message(), ContainsRegex("^" + first)) << lost;
    EXPECT_THAT(all[1].result.message(), ContainsRegex("^" + second)) << lost;
  }
}

TEST_F(StoreRendezvousTest, AStoreThatEndsIsNamed) {
  std::shared_ptr<TcpServer> server = *TcpServer::serve({{"127.0.0.1", 0}, {}, false}, {}, {});
  const uint16_t port = server->port();
  std::vector<Process> all = processes(3);
  all.pop_back();
  for (Process &each : all)
    each.store = [port] { return openStore({"tcp://127.0.0.1:" + std::to_string(port), false, {}, false}, in(5'000)); };
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    server.reset();
  });
  run(all);
  ending.join();
  for (const Process &each : all)
    EXPECT_THAT(each.result.message(), HasSubstr("lost the store at 127.0.0.1:" + std::to_string(port)));
}

TEST_F(StoreRendezvousTest, StrangersWithoutTheSecretAreMentioned) {
  const Authenticator right = secret("right");
  TcpStoreConfig config; // not as one expression, of which g++ 12 says that it is uninitialized
  config.where.host = "127.0.0.1";
  config.authenticator = right;
  const auto server = *TcpServer::serve(config, {}, {});
  const std::string url = "tcp://127.0.0.1:" + std::to_string(server->port());
  std::vector<Process> all = processes(2);
  for (Process &each : all) {
    each.deadline = 500;
    each.options.authenticator = each.options.rank == 0 ? right : secret("wrong");
    each.store = [&each, url] { return openStore({url, false, each.options.authenticator, false}, in(5'000)); };
  }
  run(all);
  EXPECT_EQ(all[0].result.message(), "timed out: rank 1 has not joined; rank 0's store refused 1 client that did not "
                                     "have its secret, the last from 127.0.0.1");
  EXPECT_THAT(all[1].result.message(), HasSubstr("has another secret"));
}

TEST(Records, DecodersAcceptAnyBytes) {
  Roster roster{5, {1, 2, 3}, failed("reason")};
  const Hello hello{kRecordVersion, "1", 7, "h", 8, 9, "content"};
  const std::vector<std::string> records = {hello.encode(), Welcome{1, 2}.encode(), Conflict{1, 2, "t"}.encode(),
                                            roster.encode(), Opened{kPlan, 1, 2}.encode()};
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string record = records[random() % records.size()];
    for (uint32_t edits = random() % 3; edits > 0; --edits)
      record[random() % record.size()] = static_cast<char>(random());
    record.resize(random() % 4 == 0 ? random() % (record.size() + 1) : record.size());
    (void)unseal({}, "k", record);
    if (const auto decoded = Hello::decode(record); decoded && decoded->version == kRecordVersion) {
      EXPECT_EQ(decoded->encode(), record);
    }
    if (const auto decoded = Roster::decode(record)) {
      EXPECT_EQ(decoded->encode(), record);
    }
    (void)Opened::decode(record);
    (void)Welcome::decode(record);
    (void)Conflict::decode(record);
  }
}

} // namespace reshard
