// SPDX-License-Identifier: Apache-2.0
// Pull mode in one process: ranks of sources and replicas are threads, and their messengers are in memory.
#pragma once

#include "executor/digests/run_digests.h"
#include "executor/pull/pull_transport.h"
#include "schema/manifest.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <thread>

namespace reshard::pull {

using Clock = std::chrono::steady_clock;

/// Whether a condition holds within 10 s.
inline bool soon(const std::function<bool()> &condition) {
  for (const Deadline deadline = deadlineIn(10); !condition();
       std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (passed(deadline))
      return false;
  return true;
}

/// A store of this process.
class MemoryStore : public Store {
public:
  Status set(const std::string &key, std::string_view value, const Deadline &) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    return {};
  }
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) override {
    std::unique_lock lock(mutex_);
    if (!silent_.empty() && key.ends_with(silent_)) {
      lock.unlock();
      std::this_thread::sleep_until(*deadline);
      return timedOut("the store does not answer");
    }
    const auto found = values_.find(key);
    return found == values_.end() ? std::optional<std::string>() : std::optional(found->second);
  }
  void clear() { values_.clear(); }
  /// From now on, gives no answer for keys that end so.
  void silence(const std::string &end) {
    const std::lock_guard lock(mutex_);
    silent_ = end;
  }

private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::string silent_;
};

/// Two source ranks and replicas of two ranks.
inline const std::string kPairs =
    "version: 1\nmodel: {dtype: bf16, index: {l: 3}, tensors: {\"r.{l}\": {shape: [96, 48], shard: "
    "{0: tp}}, \"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n"
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2}, ranks: 2..3, replicas: 4}\n";

class PullCase : public testing::Test {
protected:
  /// A process of the fleet.
  struct Process {
    Process(const Plan &plan, const Fleet &fleet, uint32_t rank)
        : worldRank(rank), memory(plan, fleet.planRank(rank)) {}
    const uint32_t worldRank;
    tests::RankMemory memory;
    std::vector<std::string> addresses; // of its messengers
    std::unique_ptr<PullTransport> transport;
    std::unique_ptr<RunDigests> digests;
  };

  void compile(const std::string &job) {
    plan = tests::compiledPlan(job);
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
                        .rangeBytes = rangeBytes};
    process->transport = std::make_unique<PullTransport>(std::move(options));
    EXPECT_EQ(process->transport->prepare(*plan, {process->memory.local}, deadlineIn(10)).message(), "");
    const auto local = [this, planRank = fleet.planRank(worldRank)](uint32_t endpoint, uint32_t meshRank) {
      return plan->manifest().endpoints()->Get(endpoint)->ranks()->Get(meshRank) == planRank;
    };
    const auto bound = [&memory = process->memory.local](uint32_t endpoint, uint32_t meshRank, uint32_t param,
                                                         uint32_t instance) -> const std::byte * {
      for (size_t r = 0; r < memory.memory.size(); ++r)
        if (const schema::BufferRange &range = *memory.segment->buffers()->Get(static_cast<uint32_t>(r));
            range.endpoint() == endpoint && range.mesh_rank() == meshRank && range.param() == param)
          return memory.memory[r][instance];
      return nullptr;
    };
    process->digests = std::make_unique<RunDigests>(DigestMemory{*plan, *process->transport, 1, local, bound});
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
  /// Ends all processes, and forgets what they have said.
  void end() {
    processes.clear();
    store.clear();
    expected.clear();
  }
  void publish(uint64_t version) {
    for (const uint32_t rank : fleet.sources())
      publish(rank, version);
  }
  void publish(uint32_t rank, uint64_t version) { publish(rank, version, version); }
  /// Publishes other values than those that have the seed `version`.
  void publish(uint32_t rank, uint64_t version, uint64_t seed) {
    Process &process = *processes[rank];
    process.memory.fill(seed);
    EXPECT_EQ(process.transport->publish(version, none, [&] { return process.digests->sourceDigests(); }).message(),
              "");
  }
  /// The same number as that of an earlier version, for other values.
  void publishAgain(uint64_t version) {
    constexpr uint64_t kSeed = 99;
    expected[version] = tests::copied(*plan, kSeed);
    for (const uint32_t rank : fleet.sources())
      publish(rank, version, kSeed);
  }
  void publishWithoutDigests(uint32_t rank, uint64_t version) {
    processes[rank]->memory.fill(version);
    EXPECT_EQ(processes[rank]->transport->publish(version, none).message(), "");
  }
  void release(double seconds = 10) {
    for (const uint32_t rank : fleet.sources())
      EXPECT_EQ(processes[rank]->transport->release(deadlineIn(seconds)).message(), "");
  }
  /// What the coordinator tells a source rank of the only replica; nothing if there are several, or none.
  std::optional<ReplicaInfo> onlyReplica(uint32_t asks = 1) {
    const Result<std::vector<ReplicaInfo>> found = processes[asks]->transport->replicas(deadlineIn(10));
    return found.ok() && found->size() == 1 ? std::optional(found->front()) : std::nullopt;
  }
  /// Cuts the network at a process, or joins it again.
  void cut(uint32_t rank, bool isCut) {
    for (const std::string &address : processes[rank]->addresses)
      network.cut(address, isCut);
  }
  void delay(uint32_t rank, double seconds) {
    for (const std::string &address : processes[rank]->addresses)
      network.delay(address, seconds);
  }
  /// The first messenger of a process, which its peers connect to, does nothing meanwhile.
  void freeze(uint32_t rank, bool frozen = true) { network.freeze(processes[rank]->addresses[0], frozen); }
  /// Pulls with a rank, and compares digests if `checked`, for which the replicas of a source must be equal. The bytes
  /// are those of the version.
  Result<uint64_t> pull(uint32_t rank, uint64_t least = 0, double seconds = 10, bool checked = false) {
    Process &process = *processes[rank];
    PullCheck check;
    RunDigests::RankBuckets buckets;
    if (checked) {
      buckets = *process.digests->bucketsOf(fleet.meshRankOf(rank), false);
      check.buckets = buckets.numbers;
      for (const uint32_t source : buckets.sources)
        check.sources.push_back(fleet.sources()[source]);
      check.checkDigests = [&](const std::vector<CountedDigest> &expected) {
        return process.digests->checkDigests(buckets, expected, false);
      };
      check.compare = [&](const std::vector<CountedDigest> &expected, const std::function<void()> &poll) {
        Result<std::string> differences =
            process.digests->compareRank(fleet.meshRankOf(rank), buckets, expected, poll, {});
        ++comparisons;
        return differences;
      };
    }
    const auto beforeWrite = [&] {
      ++writes;
      return Status();
    };
    const Result<uint64_t> version =
        process.transport->pull({least, deadlineIn(seconds), beforeWrite, none, checked ? &check : nullptr});
    if (version.ok())
      expectVersion(process, *version);
    return version;
  }
  void expectVersion(const Process &process, uint64_t version) {
    const std::lock_guard lock(mutex);
    auto &ranks = expected[version];
    if (ranks.empty())
      ranks = tests::copied(*plan, version);
    EXPECT_TRUE(process.memory.bytes() == ranks[fleet.planRank(process.worldRank)]->bytes())
        << fleet.name(process.worldRank) << " version " << version;
  }
  /// Pulls with all ranks of a replica: "3 3", or the first error.
  std::string pullReplica(uint32_t replica, uint64_t least = 0, double seconds = 10, bool checked = false) {
    std::vector<std::string> texts(fleet.replicaRanks());
    tests::onThreads(fleet.replicaRanks(), [&](uint32_t i) {
      const Result<uint64_t> version = pull(fleet.worldRank(replica, i), least, seconds, checked);
      texts[i] = version.ok() ? std::to_string(*version) : version.status().message();
    });
    std::string text;
    for (const std::string &each : texts)
      text += (text.empty() ? "" : " ") + each;
    return text;
  }

  static Status none() { return {}; }

  std::unique_ptr<Plan> plan;
  Fleet fleet;
  MemoryStore store;
  tests::LocalNetwork network;
  bool oneHost = false;
  uint64_t rangeBytes = 1000;
  std::map<uint32_t, std::unique_ptr<Process>> processes; // by world rank
  std::atomic<int> writes{0};                             // versions of which a rank has written a byte
  std::atomic<int> comparisons{0};                        // of digests, that have ended
  std::mutex mutex;
  std::map<uint64_t, tests::Ranks> expected; // by version
};

} // namespace reshard::pull
