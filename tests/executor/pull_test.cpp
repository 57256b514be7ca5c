// SPDX-License-Identifier: Apache-2.0
// Pull mode in one process: ranks of sources and replicas are threads, and their messengers are in memory.

#include "executor/pull/pull_transport.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ranks.h"
#include "tests/lib/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

using namespace reshard;
using namespace reshard::pull;
using testing::HasSubstr;
using tests::RankMemory;

namespace {

using Clock = std::chrono::steady_clock;

Deadline in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// A store of this process.
class MemoryStore : public Store {
public:
  Status set(const std::string &key, std::string_view value, const Deadline &) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    return {};
  }
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &) override {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::optional<std::string>() : std::optional(found->second);
  }
  void clear() { values_.clear(); }

private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

/// Two source ranks and replicas of two ranks: a source sends as much as a replica's rank receives, so one replica at a
/// time reads from the sources.
const std::string kPairs =
    "version: 1\nmodel: {dtype: bf16, index: {l: 3}, tensors: {\"r.{l}\": {shape: [96, 48], shard: "
    "{0: tp}}, \"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n"
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2}, ranks: 2..3}\n";
/// One rank of a node receives and forwards.
const std::string kForwarded =
    "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {a: [96, 40], \"r.{l}\": {shape: [96, 48], shard: {0: "
    "tp}}, \"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n"
    "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2, dp: 2}, ranks: 4..7}\noptions: {topology: {ranks_per_node: 4}}\n";
/// Ranges of rows and columns.
const std::string kRagged =
    "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [96, 40], shard: {0: tp}}, c: {shape: "
    "[31, 90], shard: {1: tp}}, b: [7]}}\n"
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3}, ranks: 2..4}\n";

class Pull : public testing::Test {
protected:
  /// A process of the fleet.
  struct Process {
    Process(const Plan &plan, const Fleet &fleet, uint32_t rank)
        : worldRank(rank), memory(plan, fleet.planRank(rank)) {}
    const uint32_t worldRank;
    RankMemory memory;
    std::vector<std::string> addresses; // of its messengers
    std::unique_ptr<PullTransport> transport;
  };

  void compile(const std::string &job) {
    tests::compile(job, folder / "plan");
    ASSERT_EQ(Plan::open(folder / "plan", plan).message(), "");
    Result<Fleet> found = Fleet::of(*plan);
    ASSERT_EQ(found.status().message(), "");
    fleet = *found;
  }
  Process &start(uint32_t worldRank) {
    auto &process = processes[worldRank];
    process.reset();
    process = std::make_unique<Process>(*plan, fleet, worldRank);
    PullOptions options{.fleet = fleet,
                        .worldRank = worldRank,
                        .store = &store,
                        .job = {.name = {}, .plan = plan->digest(), .rank = worldRank, .size = 1, .authenticator = {}},
                        .open = [this, &process]() -> Result<std::unique_ptr<Messenger>> {
                          auto messenger = network.open(process->worldRank % 2 == 0 || oneHost
                                                            ? "host"
                                                            : "host" + std::to_string(process->worldRank));
                          process->addresses.push_back(messenger->address());
                          return messenger;
                        },
                        .rangeBytes = 1000};
    process->transport = std::make_unique<PullTransport>(std::move(options));
    EXPECT_EQ(process->transport->prepare(*plan, {process->memory.local}, in(10)).message(), "");
    return *process;
  }
  void startSources() {
    for (const uint32_t rank : fleet.sources())
      start(rank);
  }
  void startReplica(uint32_t replica) {
    for (uint32_t i = 0; i < fleet.replicaRanks(); ++i)
      start(fleet.worldRank(replica, i));
  }
  void publish(uint64_t version) {
    for (const uint32_t rank : fleet.sources())
      publish(rank, version);
  }
  void publish(uint32_t rank, uint64_t version) {
    processes[rank]->memory.fill(version);
    EXPECT_EQ(processes[rank]->transport->publish(version, [] { return Status(); }).message(), "");
  }
  void release(double seconds = 10) {
    for (const uint32_t rank : fleet.sources())
      EXPECT_EQ(processes[rank]->transport->release(in(seconds)).message(), "");
  }
  /// Pulls with a rank; the bytes are those of the version.
  Result<uint64_t> pull(uint32_t rank, uint64_t least = 0, double seconds = 10) {
    Process &process = *processes[rank];
    const Result<uint64_t> version = process.transport->pull({least, in(seconds),
                                                              [&] {
                                                                ++writes;
                                                                return Status();
                                                              },
                                                              [] { return Status(); }});
    if (version.ok())
      check(process, *version);
    return version;
  }
  void check(const Process &process, uint64_t version) {
    const std::lock_guard lock(mutex);
    auto &ranks = expected[version];
    if (ranks.empty())
      ranks = tests::copied(*plan, version);
    EXPECT_TRUE(process.memory.bytes() == ranks[fleet.planRank(process.worldRank)]->bytes())
        << fleet.name(process.worldRank) << " version " << version;
  }
  /// Pulls with all ranks of a replica: "3 3", or the first error.
  std::string pullReplica(uint32_t replica, uint64_t least = 0, double seconds = 10) {
    std::vector<std::string> texts(fleet.replicaRanks());
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < fleet.replicaRanks(); ++i)
      threads.emplace_back([&, i] {
        const Result<uint64_t> version = pull(fleet.worldRank(replica, i), least, seconds);
        texts[i] = version.ok() ? std::to_string(*version) : version.status().message();
      });
    for (std::thread &thread : threads)
      thread.join();
    std::string text;
    for (const std::string &each : texts)
      text += (text.empty() ? "" : " ") + each;
    return text;
  }

  const tests::TemporaryFolder folder;
  std::unique_ptr<Plan> plan;
  Fleet fleet;
  MemoryStore store;
  tests::LocalNetwork network;
  bool oneHost = false;
  std::map<uint32_t, std::unique_ptr<Process>> processes; // by world rank
  std::atomic<int> writes{0};                             // versions of which a rank has written a byte
  std::mutex mutex;
  std::map<uint64_t, tests::Ranks> expected; // by version
};

TEST_F(Pull, AReplicaPullsTheVersionsThatTheSourcesPublish) {
  for (const std::string &job : {kPairs, kForwarded, kRagged})
    for (const bool readable : {false, true}) {
      SCOPED_TRACE(job);
      oneHost = readable;
      expected.clear();
      compile(job);
      startReplica(0); // before the sources
      startSources();
      std::string all;
      for (uint64_t version : {1, 2, 7}) {
        publish(version);
        all.clear();
        for (uint32_t i = 0; i < fleet.replicaRanks(); ++i)
          all += (i ? " " : "") + std::to_string(version);
        EXPECT_EQ(pullReplica(0), all);
        release();
      }
      publish(8);
      start(fleet.worldRank(1, 0));
      for (uint32_t i = 1; i < fleet.replicaRanks(); ++i)
        start(fleet.worldRank(1, i));
      EXPECT_EQ(pullReplica(1).substr(0, 3), "8 8");
      processes.clear();
      store.clear();
    }
}

} // namespace
