// SPDX-License-Identifier: Apache-2.0
// reshard_replace: the memory, connections and options that an executor keeps with another plan, with transport
// `threads` and, with ranks as threads of this process, `ucx`.

#include "reshard/reshard.hpp"
#include "tests/executor/callers_store.h"
#include "tests/executor/thrown.h"
#include "tests/executor/ucx_case.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <netinet/in.h>
#include <set>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace {

using reshard::tests::onThreads;
using reshard::tests::thrown;
using testing::HasSubstr;
using testing::Not;

/// The open sockets of this process.
std::set<std::string> sockets() {
  std::set<std::string> found;
  for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(entry, closed).string();
    if (target.starts_with("socket:"))
      found.insert(target);
  }
  return found;
}

/// The memory of one process, by role and name.
using Memory = std::map<std::pair<std::string, std::string>, std::vector<float>>;

class Replace : public testing::Test {
protected:
  void SetUp() override {
    // The targets are ranks 0 and 1; the source is ranks 2, 3 and 4, then 2 and 3.
    compile("three", "source: {mesh: {tp: 1, dp: 3}, ranks: 2..4}\ntarget: {mesh: {tp: 2}}\n");
    compile("two", "source: {mesh: {tp: 1, dp: 2}, ranks: 2..3}\ntarget: {mesh: {tp: 2}}\n");
    compile("one", "source: {mesh: {tp: 1, dp: 2}, ranks: 2..3}\ntarget: {mesh: {tp: 1, dp: 2}}\n");
  }

  void compile(const std::string &name, const std::string &endpoints) {
    reshard::tests::compile(
        "version: 1\nmodel: {dtype: fp32, tensors: {a: {shape: [1000, 40], shard: {0: tp}}, b: [7]}}\n" + endpoints,
        folder_ / name);
  }

  /// Binds the params of a rank that have no memory yet, or memory of another size.
  void bind(reshard::Executor &executor, const std::string &name, uint32_t rank, Memory &memory) const {
    const reshard::PlanFile plan(folder_ / name);
    for (uint32_t e = 0; e < plan.summary().endpoints; ++e) {
      const reshard_endpoint at = plan.endpoint(e);
      if (std::find(at.ranks, at.ranks + at.rank_count, rank) == at.ranks + at.rank_count)
        continue;
      for (const reshard_param &param : plan.params(e, rank)) {
        std::vector<float> &values = memory[{at.role, param.name}];
        if (values.size() * sizeof(float) == param.bytes)
          continue;
        values.assign(param.bytes / sizeof(float), -1);
        executor.bind(e, rank, param.name, values.data(), param.bytes);
      }
    }
  }

  /// Binds the params of all ranks, those of `memory`, and prepares the executor.
  void prepare(reshard::Executor &executor, const std::string &name, std::vector<Memory> &memory) const {
    for (uint32_t rank = 0; rank < memory.size(); ++rank)
      bind(executor, name, rank, memory[rank]);
    executor.prepare();
  }

  static void fill(Memory &memory, float version) {
    for (auto &[at, values] : memory)
      for (size_t i = 0; at.first == "source" && i < values.size(); ++i)
        values[i] = static_cast<float>(i) + version;
  }

  static void run(reshard::Executor &executor, std::vector<Memory> &memory, float version) {
    for (Memory &each : memory)
      fill(each, version);
    executor.run();
  }

  /// Checks the memory of a target, whose rows of `a` begin at `row`.
  static void expectVersion(const Memory &memory, float version, size_t row) {
    for (const auto &[at, values] : memory)
      for (size_t i = 0; at.first == "target" && i < values.size(); ++i) {
        const size_t begin = at.second == "a" ? row * 40 : 0;
        ASSERT_EQ(values[i], static_cast<float>(begin + i) + version) << at.second << " " << i;
      }
  }

  const reshard::tests::TemporaryFolder folder_;
};

TEST_F(Replace, KeepsMemoryAndVersion) {
  std::vector<Memory> memory(5);
  reshard::Executor executor(folder_ / "three");
  prepare(executor, "three", memory);
  for (const bool replaced : {false, true}) {
    if (replaced) {
      executor.replace(folder_ / "two");
      EXPECT_EQ(executor.ranks().size(), 4u);
      executor.prepare(); // nothing is missing
    }
    run(executor, memory, 5.F + replaced);
    expectVersion(memory[0], 5.F + replaced, 0);
    expectVersion(memory[1], 5.F + replaced, 500);
    EXPECT_EQ(executor.version(), 1u + replaced);
  }
}

TEST_F(Replace, ReleasesMemoryOfAnotherSize) {
  std::vector<Memory> memory(4);
  reshard::Executor executor(folder_ / "two");
  prepare(executor, "two", memory);
  run(executor, memory, 1);
  std::vector<Memory> released(2);
  for (uint32_t rank : {0u, 1u})
    std::swap(released[rank][{"target", "a"}], memory[rank][{"target", "a"}]);
  const std::vector<Memory> before = released;
  executor.replace(folder_ / "one");
  EXPECT_EQ(thrown([&] { executor.prepare(); }).first, RESHARD_BAD_BINDING);
  for (uint32_t rank : {0u, 1u})
    bind(executor, "one", rank, memory[rank]); // binds `a` alone: `b` is bound
  executor.prepare();
  run(executor, memory, 2);
  for (uint32_t rank : {0u, 1u})
    expectVersion(memory[rank], 2, 0);
  EXPECT_EQ(released, before);
}

TEST_F(Replace, AFailureChangesNothing) {
  std::vector<Memory> memory(4);
  reshard::Executor executor(folder_ / "two");
  prepare(executor, "two", memory);
  EXPECT_EQ(thrown([&] { executor.replace(folder_ / "two.yaml"); }).first, RESHARD_BAD_PLAN);
  EXPECT_EQ(thrown([&] { executor.replace(folder_ / "absent"); }).first, RESHARD_BAD_PLAN);
  EXPECT_THAT(thrown([&] { executor.replace(folder_ / "one", {0, 1, 1}); }).second, HasSubstr("given twice"));
  EXPECT_NE(thrown([&] { executor.replace(folder_ / "one", {0, 1, 2, 9}); }).first, RESHARD_OK);
  EXPECT_THAT(thrown([&] { executor.replace(folder_ / "one", {}, "file:///x"); }).second, HasSubstr("no rendezvous"));
  EXPECT_EQ(reshard_replace(executor.handle(), nullptr, nullptr, 0, nullptr), RESHARD_INVALID);
  run(executor, memory, 3);
  expectVersion(memory[0], 3, 0);
  expectVersion(memory[1], 3, 500);
}

TEST_F(Replace, HooksAndTransportsOfOneProcessStay) {
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.threads = 1;
  std::vector<Memory> memory(4);
  reshard::Executor executor(folder_ / "two", options);
  for (uint32_t rank = 0; rank < 4; ++rank)
    bind(executor, "two", rank, memory[rank]);
  for (int times = 0; times < 50; ++times) {
    executor.replace(folder_ / "two");
    executor.prepare();
  }
  run(executor, memory, 4);
  expectVersion(memory[1], 4, 500);
}

class ReplaceOverUcx : public Replace {
protected:
  void SetUp() override {
    reshard::tests::useUcx("tcp");
    Replace::SetUp();
  }
  void TearDown() override { ::unsetenv("UCX_TLS"); }
  static reshard_options overUcx(const char *rendezvous, double seconds = 60) {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.transport = "ucx";
    options.rendezvous = rendezvous;
    options.join_seconds = seconds;
    return options;
  }
};

// The struct of the caller's store is read only during open.
TEST_F(ReplaceOverUcx, AUrlReplacesTheStoreOfTheCaller) {
  compile("alone", "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}}\n");
  reshard::tests::CallersStore callers;
  reshard_store store = callers.store();
  reshard_options options = overUcx(nullptr);
  options.store = &store;
  reshard::Executor executor(folder_ / "alone", options, {0});
  store = RESHARD_STORE_INITIALIZER;
  executor.replace(folder_ / "alone", {0}); // the store stays open
  const int calls = callers.calls;
  EXPECT_GT(calls, 0);
  executor.replace(folder_ / "alone", {0}, "file://" + folder_.path());
  EXPECT_EQ(callers.calls, calls);
  Memory memory;
  bind(executor, "alone", 0, memory);
  executor.prepare();
  fill(memory, 6);
  executor.run(30);
  expectVersion(memory, 6, 0);
}

/// A port of this host that no socket has.
std::string freePort() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  EXPECT_EQ(::bind(socket, reinterpret_cast<sockaddr *>(&address), bytes), 0);
  EXPECT_EQ(::getsockname(socket, reinterpret_cast<sockaddr *>(&address), &bytes), 0);
  ::close(socket);
  return std::to_string(ntohs(address.sin_port));
}

// Rank 1 waits for the store of rank 0 almost until its deadline. Its later waits have all of join_seconds again.
TEST_F(ReplaceOverUcx, AWaitAtOpenDoesNotShortenLaterWaits) {
  compile("pair", "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}, ranks: [1]}\n");
  const std::string url = "tcp://127.0.0.1:" + freePort();
  std::vector<std::unique_ptr<reshard::Executor>> executors(2); // that of rank 0 has the store
  onThreads(2, [&](uint32_t rank) {
    const reshard_options options = overUcx(url.c_str(), 5);
    const auto later = [&](double seconds) {
      if (rank == 0)
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    };
    const auto error = thrown([&] {
      later(3);
      executors[rank] = std::make_unique<reshard::Executor>(folder_ / "pair", options, std::vector{rank});
      later(2.5);
      executors[rank]->replace(folder_ / "pair", {rank});
    });
    EXPECT_EQ(error.second, "") << "rank " << rank;
  });
}

// Rank 3 never runs. Without the shared memory, only ranks that have messages of rank 3 know it.
TEST_F(ReplaceOverUcx, ARankThatHasNotBegunTheRunIsNamed) {
  for (const int shortcut : {1, 0}) {
    std::vector<Memory> memory(5);
    std::vector<std::unique_ptr<reshard::Executor>> executors(5);
    const reshard::tests::TemporaryFolder meeting;
    const std::string url = "file://" + meeting.path();
    onThreads(5, [&](uint32_t rank) {
      reshard_options options = overUcx(url.c_str());
      options.no_local_shortcut = !shortcut;
      const auto error = thrown([&] {
        executors[rank] = std::make_unique<reshard::Executor>(folder_ / "three", options, std::vector{rank});
        bind(*executors[rank], "three", rank, memory[rank]);
        executors[rank]->prepare();
        executors[rank]->run(30);
      });
      EXPECT_EQ(error.second, "");
    });
    std::atomic<int> named{0};
    onThreads(5, [&](uint32_t rank) {
      if (rank == 3)
        return;
      const auto error = thrown([&] { executors[rank]->run(2); });
      for (uint32_t other = 0; other < 5; ++other)
        if (other != 3) {
          EXPECT_THAT(error.second, Not(HasSubstr("rank " + std::to_string(other) + " has not begun"))) << rank;
        }
      const bool names = error.second.find("rank 3 has not begun the run") != std::string::npos;
      EXPECT_TRUE(names || !shortcut) << rank << ": " << error.second;
      named += names;
    });
    EXPECT_GT(named, 0);
  }
}

// A rank whose params cannot be bound is closed; the others, which have no deadline, learn why.
TEST_F(ReplaceOverUcx, TheReasonOfAFailedBindReachesThePeers) {
  for (const uint32_t failing : {0u, 3u})
    for (const std::string reason : {"found 1 bytes, expected 28", "not all instances are bound", "my own reason"}) {
      SCOPED_TRACE(std::to_string(failing) + " " + reason);
      const reshard::tests::TemporaryFolder meeting;
      const std::string url = "file://" + meeting.path();
      std::vector<Memory> memory(5);
      onThreads(5, [&](uint32_t rank) {
        const reshard_options options = overUcx(url.c_str(), 0);
        const auto error = thrown([&] {
          reshard::Executor executor(folder_ / "three", options, std::vector{rank});
          if (rank != failing)
            bind(executor, "three", rank, memory[rank]);
          else if (reason.starts_with("found"))
            executor.bind(failing == 0, rank, "b", memory.data(), 1);
          else if (reason.starts_with("my"))
            executor.fail(reason);
          if (rank == failing && reason.starts_with("my"))
            return;
          executor.prepare();
        });
        if (rank != failing) {
          EXPECT_THAT(error.second, HasSubstr("rank " + std::to_string(failing) + " has failed: ")) << rank;
        }
        if (rank != failing || !reason.starts_with("my")) {
          EXPECT_THAT(error.second, HasSubstr(reason)) << rank;
        }
      });
    }
}

// Rank 2, a source, leaves. The others keep the connections that they have.
TEST_F(ReplaceOverUcx, ConnectionsAndMemoryStay) {
  std::vector<Memory> memory(5);
  std::vector<std::unique_ptr<reshard::Executor>> executors(5);
  const std::string url = "file://" + folder_.path();
  const auto run = [&](uint32_t rank, float version, size_t row) {
    executors[rank]->prepare();
    fill(memory[rank], version);
    executors[rank]->run(30);
    expectVersion(memory[rank], version, row);
  };
  onThreads(5, [&](uint32_t rank) {
    reshard_options options = overUcx(url.c_str());
    options.no_local_shortcut = 1;
    const auto error = thrown([&] {
      executors[rank] = std::make_unique<reshard::Executor>(folder_ / "three", options, std::vector{rank});
      bind(*executors[rank], "three", rank, memory[rank]);
      run(rank, 1, rank * 500);
    });
    EXPECT_EQ(error.second, "") << "rank " << rank;
  });
  ASSERT_FALSE(HasFailure());
  const std::set<std::string> before = sockets();
  for (float version = 2; version < 6; ++version) {
    onThreads(4, [&](uint32_t next) {
      const uint32_t rank = next + (next >= 2);
      const auto error = thrown([&] {
        executors[rank]->replace(folder_ / "two", {next});
        run(rank, version, next * 500);
      });
      EXPECT_EQ(error.second, "") << "rank " << rank;
      EXPECT_EQ(executors[rank]->version(), static_cast<uint64_t>(version));
    });
    ASSERT_FALSE(HasFailure());
  }
  const std::set<std::string> after = sockets();
  std::vector<std::string> kept;
  std::set_intersection(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(kept));
  EXPECT_GT(kept.size(), before.size() / 2);
  EXPECT_LE(after.size(), before.size() + 8); // source 3 may send what source 2 has sent
  onThreads(5, [&](uint32_t rank) { executors[rank].reset(); });
}

} // namespace
