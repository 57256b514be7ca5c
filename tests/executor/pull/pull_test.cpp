// SPDX-License-Identifier: Apache-2.0
// Pull mode in one process: ranks of sources and replicas are threads, and their messengers are in memory.

#include "tests/executor/pull_case.h"

#include <gmock/gmock.h>

using namespace reshard;
using namespace reshard::pull;
using testing::HasSubstr;

namespace {

/// The memory of quantized and cast params, converted as they are sent or as they arrive.
const std::string kConverted[] = {"dtype: fp32, convert: rne",
                                  "quantize: mxfp8",
                                  "quantize: {format: mxfp8, by: sender, scale_layout: swizzled}",
                                  "quantize: {format: block_fp8, by: receiver}",
                                  "quantize: {format: nvfp4, scale_layout: swizzled}",
                                  "quantize: {format: block_fp8_ue8m0, by: receiver, scale_layout: packed}"};

/// One rank of a node receives and forwards.
const std::string kForwarded =
    "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {a: [96, 40], \"r.{l}\": {shape: [96, 48], shard: {0: "
    "tp}}, \"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n"
    "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2, dp: 2}, ranks: 4..7, replicas: 4}\noptions: {topology: "
    "{ranks_per_node: 4}}\n";
/// Ranges of rows and columns.
const std::string kRagged =
    "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [96, 40], shard: {0: tp}}, c: {shape: "
    "[31, 90], shard: {1: tp}}, b: [7]}}\n"
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3}, ranks: 2..4, replicas: 4}\n";
using Pull = PullCase;

TEST_F(Pull, AReplicaPullsTheVersionsThatTheSourcesPublish) {
  for (const std::string &job : {kPairs, kForwarded, kRagged})
    for (const bool readable : {false, true}) {
      SCOPED_TRACE(job);
      oneHost = readable;
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
      startReplica(1);
      EXPECT_EQ(pullReplica(1).substr(0, 3), "8 8");
      end();
    }
}

TEST_F(Pull, AReplicaThatHoldsTheNewestVersionMovesNothing) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(4);
  EXPECT_EQ(pullReplica(0), "4 4");
  EXPECT_EQ(writes, 2);
  EXPECT_EQ(pullReplica(0), "4 4");
  EXPECT_EQ(writes, 2);
  release();
  publish(5);
  EXPECT_EQ(pullReplica(0, 5), "5 5");
  EXPECT_EQ(writes, 4);
}

TEST_F(Pull, APullWaitsForItsVersionAndForTheSources) {
  compile(kPairs);
  startReplica(0);
  EXPECT_THAT(pull(2, 0, 0.2).status().message(),
              HasSubstr("timed out: source rank 0 (world rank 0) has not opened this plan"));
  startSources();
  EXPECT_EQ(pull(2, 3, 0.2).status().message(), "timed out: no source has published version >= 3; none is published");
  publish(0, 2);
  EXPECT_EQ(pull(2, 1, 0.2).status().message(), "timed out: source rank 1 (world rank 1) has not published version 2");
  publish(1, 2);
  EXPECT_EQ(pull(2, 3, 0.2).status().message(), "timed out: no source has published version >= 3; the newest is 2");
  EXPECT_EQ(pull(2, 2, 0.5).status().message(), "timed out: this rank has version 2, but other ranks of replica 0 have "
                                                "not completed it");
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    release();
    publish(3);
  });
  EXPECT_EQ(pullReplica(0, 3), "3 3");
  later.join();
}

TEST_F(Pull, PublishAndReleaseCheckTheirOrder) {
  compile(kPairs);
  startSources();
  PullTransport &source = *processes[0]->transport;
  EXPECT_EQ(source.release({}).message(), "no version is published");
  EXPECT_EQ(source.publish(0, none).message(), "found version 0, expected more than 0");
  EXPECT_EQ(source.publish(5, none).message(), "");
  EXPECT_EQ(source.publish(6, none).message(), "version 5 is published already; release it first");
  EXPECT_EQ(source.release({}).message(), "");
  EXPECT_EQ(source.publish(5, none).message(),
            "found version 5, expected more than 5, the version that was published last");
  EXPECT_EQ(source.publish(6, [] { return failed("the hook"); }).message(), "the hook");
  EXPECT_EQ(source.publish(6, none).message(), "");
  EXPECT_EQ(source.run({}).kind(), ErrorKind::invalid);
  EXPECT_EQ(source.allReduceMin(1, {}).status().kind(), ErrorKind::invalid);
}

TEST_F(Pull, ReleaseRevokesTheLeasesOfReadersAndNamesThem) {
  rangeBytes = 1 << 20; // one range is all that a rank reads: only its confirmation can be refused
  for (const bool readable : {false, true}) {
    oneHost = readable;
    compile(kPairs);
    startSources();
    startReplica(3);
    publish(1);
    delay(9, 0.15); // a rank of the replica has a lease, and does not get the data
    std::thread puller([&] { EXPECT_EQ(pullReplica(3, 0, 20), "2 2"); });
    std::string text;
    for (int attempt = 0; attempt < 5000 && text.empty(); ++attempt) { // until the rank has a lease
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (processes[1]->transport->leases() > 0)
        text = processes[1]->transport->release(deadlineIn(0.05)).message();
    }
    EXPECT_THAT(text, HasSubstr("timed out: version 1 was still read by "));
    EXPECT_THAT(text, HasSubstr("replica 3 rank 1 (world rank 9), for "));
    EXPECT_THAT(text, HasSubstr("; their leases are revoked"));
    [[maybe_unused]] const Status first = processes[0]->transport->release(deadlineIn(0.01));
    delay(9, 0);
    publish(2); // writes the memory
    puller.join();
    end();
  }
}

TEST_F(Pull, ReplicasReadFromOthersThatPull) {
  compile(kPairs);
  oneHost = true;
  startSources();
  for (const uint32_t replica : {0, 1, 2, 3})
    startReplica(replica);
  publish(1);
  tests::onThreads(4, [&](uint32_t replica) { EXPECT_EQ(pullReplica(replica), "1 1"); });
  const Result<std::vector<ReplicaInfo>> replicas = processes[1]->transport->replicas(deadlineIn(5));
  ASSERT_TRUE(replicas.ok()) << replicas.status().message();
  ASSERT_EQ(replicas->size(), 4u);
  for (const ReplicaInfo &info : *replicas) {
    EXPECT_EQ(info.state, ReplicaInfo::kComplete);
    EXPECT_EQ(info.version, 1u);
    EXPECT_EQ(info.ranks, 2u);
  }
  release();
}

TEST_F(Pull, AFrozenOrEndedParentIsLeft) {
  compile(kPairs);
  for (const bool ends : {false, true}) {
    startSources();
    for (const uint32_t replica : {0, 1})
      startReplica(replica);
    publish(1);
    // Rank 0 of replica 0 has its bytes, and waits for rank 1: so replica 0 still pulls, and is the parent of
    // replica 1.
    std::thread first([&] { EXPECT_FALSE(pull(2, 0, 2.5).ok()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (ends)
      network.kill(processes[2]->addresses[0]);
    else
      freeze(2);
    const auto begin = Clock::now();
    EXPECT_EQ(pullReplica(1, 0, 5), "1 1");
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3));
    release();
    first.join();
    end();
  }
}

TEST_F(Pull, TwoProcessesOfOneRankAreNamed) {
  compile(kPairs);
  startSources();
  start(2);
  const std::unique_ptr<Process> first = std::move(processes[2]);
  std::string text;
  std::atomic<bool> ended{false};
  std::thread puller([&] {
    text = first->transport->pull({5, deadlineIn(10), none, none}).status().message();
    ended = true;
  });
  EXPECT_TRUE(soon([&] { return onlyReplica().has_value(); }));
  start(2);
  EXPECT_FALSE(pull(2, 5, 1.5).ok());
  EXPECT_TRUE(soon([&] { return ended.load(); }));
  puller.join();
  EXPECT_EQ(text, "another process has opened this plan as replica 0 rank 0 (world rank 2); expected one process for "
                  "each rank");
}

/// As when a coordinator that did not run for a while reads frames of a process that has ended after those of its
/// successor.
TEST_F(Pull, AProcessThatHasEndedDoesNotReplaceALivingOne) {
  compile(kPairs);
  startSources();
  startReplica(0);
  const std::unique_ptr<Process> living = std::move(processes[2]);
  std::string text;
  std::thread puller([&] {
    const Result<uint64_t> pulled = living->transport->pull({5, deadlineIn(20), none, none});
    text = pulled.ok() ? std::to_string(*pulled) : pulled.status().message();
  });
  EXPECT_TRUE(soon([&] { return onlyReplica().has_value(); }));
  start(2);
  EXPECT_FALSE(pull(2, 5, 0.1).ok());
  processes[2].reset();
  publish(5);
  EXPECT_TRUE(pull(3, 5, 10).ok());
  puller.join();
  EXPECT_EQ(text, "5");
}

TEST_F(Pull, AReplicaThatIsCutOffBetweenPullsConnectsAgain) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  EXPECT_EQ(pullReplica(0), "1 1");
  for (const bool isCut : {true, false}) {
    cut(2, isCut);
    EXPECT_TRUE(soon([&] {
      const std::optional<ReplicaInfo> info = onlyReplica();
      return info && info->state == (isCut ? ReplicaInfo::kLost : ReplicaInfo::kComplete) &&
             info->ranks == (isCut ? 1u : 2u);
    }));
  }
  release();
  publish(2);
  EXPECT_EQ(pullReplica(0, 2), "2 2");
}

TEST_F(Pull, AHookThatThrowsEndsThePull) {
  compile(kPairs);
  oneHost = true;
  startSources();
  startReplica(0);
  publish(1);
  PullTransport &rank = *processes[2]->transport;
  EXPECT_THROW((void)rank.pull({0, deadlineIn(10), []() -> Status { throw std::runtime_error("the hook"); }, {}}),
               std::runtime_error);
  release(2); // the rank has left its servers
  publish(2);
  EXPECT_EQ(pullReplica(0, 2), "2 2");
  release();
}

TEST_F(Pull, ASilentStoreDoesNotStopTransfersFromConnectedServers) {
  compile(kRagged);
  rangeBytes = 100;
  startSources();
  startReplica(0);
  publish(1);
  store.silence("/pool/1"); // no process can connect to source rank 1
  EXPECT_THAT(pull(3, 0, 1.5).status().message(), HasSubstr("source rank 1 (world rank 1)"));
  uint64_t served = 0;
  for (const std::string &address : processes[0]->addresses)
    served += network.served(address);
  EXPECT_GT(served, 2000u); // rows of a and columns of c: 1280 and 930 bytes
}

TEST_F(Pull, AProcessThatStartsAgainPullsAgain) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  EXPECT_EQ(pullReplica(0), "1 1");
  start(3);
  EXPECT_EQ(pullReplica(0), "1 1");
  start(1); // a source rank
  publish(1, 1);
  startReplica(1);
  EXPECT_EQ(pullReplica(1), "1 1");
  start(0); // the coordinator
  publish(0, 1);
  EXPECT_EQ(pullReplica(1), "1 1");
  EXPECT_EQ(pullReplica(0), "1 1");
}

/// A replica holds a version, or a part of it, and the trainer starts again and gives other weights the same number.
TEST_F(Pull, ATrainerThatStartsAgainMayPublishANumberAgain) {
  compile(kPairs);
  for (const bool whole : {true, false}) {
    startSources();
    startReplica(0);
    publish(4);
    if (whole)
      EXPECT_EQ(pullReplica(0), "4 4");
    else
      EXPECT_FALSE(pull(2, 0, 0.5).ok()); // it has its bytes; rank 1 of the replica has none
    startSources();
    publishAgain(4);
    EXPECT_EQ(pullReplica(0), "4 4");
    startReplica(1);
    EXPECT_EQ(pullReplica(1), "4 4");
    end();
  }
}

/// One source rank starts again while a replica has confirmed a part of its bytes. The other one serves what it did.
TEST_F(Pull, ASourceThatStartsAgainDuringAPullServesAnotherVersion) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(4);
  delay(2, 0.05); // ranges arrive one after the other
  std::string text;
  std::thread puller([&] { text = pullReplica(0, 0, 20); });
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  network.kill(processes[1]->addresses[0]);
  start(1);
  // Both publish the new bytes: a version of one process with bytes of two would be found.
  [[maybe_unused]] const Status revoked = processes[0]->transport->release(deadlineIn(0.01));
  start(0);
  publishAgain(4);
  puller.join();
  EXPECT_EQ(text, "4 4");
}

/// The first pull of a replica whose parent it has never met: it reads from the parent, not from the sources.
TEST_F(Pull, AReplicaReadsFromAParentThatItMeets) {
  compile(kPairs);
  startSources();
  for (const uint32_t replica : {0, 1})
    startReplica(replica);
  publish(1);
  // Rank 0 of replica 0 has its bytes and waits for rank 1, so replica 0 still pulls, and is the parent of replica 1.
  std::thread first([&] { EXPECT_FALSE(pull(2, 0, 1.5).ok()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto served = [&](uint32_t rank) { return network.served(processes[rank]->addresses[0]); };
  const uint64_t before = served(0) + served(1);
  EXPECT_GT(before, 0u);
  EXPECT_FALSE(pull(4, 0, 0.7).ok()); // rank 0 of replica 1; rank 1 does not pull
  EXPECT_EQ(served(0) + served(1), before);
  EXPECT_GT(served(2), 0u);
  expectVersion(*processes[4], 1);
  first.join();
}

/// Sources publish and release; replicas pull, are frozen, cut off, killed and started again. No replica reports bytes
/// that are not those of the version that it returns, and nothing hangs.
TEST_F(Pull, FleetsThatChangeReportNoTornVersion) {
  compile(kPairs);
  startSources();
  constexpr uint32_t kReplicas = 3;
  std::atomic<bool> stop{false};
  std::atomic<int> pulled{0}, released{0}, revoked{0};
  for (uint32_t replica = 0; replica < kReplicas; ++replica)
    startReplica(replica);
  std::vector<std::thread> threads;
  for (uint32_t rank = 2; rank < 2 + 2 * kReplicas; ++rank)
    threads.emplace_back([&, rank] {
      while (!stop)
        pulled += pull(rank, 0, 2, rank % 2 == 1).ok(); // the second rank of each replica checks
    });
  threads.emplace_back([&] {
    std::mt19937_64 random(5);
    for (uint64_t version = 1; !stop; ++version) {
      publish(version);
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
      for (const uint32_t rank : {0u, 1u}) {
        const Deadline deadline = deadlineIn(0.001 * static_cast<double>(1 + random() % 60));
        ++(processes[rank]->transport->release(deadline).ok() ? released : revoked);
      }
    }
  });
  std::mt19937_64 random(11);
  const auto end = Clock::now() + std::chrono::seconds(6);
  while (Clock::now() < end) {
    const uint32_t rank = 2 + random() % (2 * kReplicas);
    const std::string address = processes[rank]->addresses[random() % 2];
    const auto pause = std::chrono::milliseconds(random() % 300);
    if (random() % 2) {
      network.freeze(address);
      std::this_thread::sleep_for(pause);
      network.freeze(address, false);
    } else {
      network.cut(address);
      std::this_thread::sleep_for(pause);
      network.cut(address, false);
    }
    std::this_thread::sleep_for(pause / 2);
  }
  stop = true;
  for (std::thread &thread : threads)
    thread.join();
  std::printf("%d pulled, %d released, %d revoked\n", pulled.load(), released.load(), revoked.load());
  EXPECT_GT(pulled, 10);
  EXPECT_GT(released, 10);
  for (const uint32_t rank : {0u, 1u})
    publish(rank, 1'000'000);
  for (uint32_t replica = 0; replica < kReplicas; ++replica)
    EXPECT_EQ(pullReplica(replica, 1'000'000), "1000000 1000000");
}

TEST_F(Pull, ConvertedParamsEqualThoseOfTransportThreads) {
  for (const std::string &form : kConverted) {
    SCOPED_TRACE(form);
    compile("version: 1\nmodel: {dtype: bf16, tensors: {a: [96, 64], r: {shape: [96, 96], shard: {0: tp}}, c: {shape: "
            "[64, 384], shard: {1: tp}}}}\nsource: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2}, replicas: 3, " +
            form + "}\noptions: {staging: 300KiB}\n");
    const std::unique_ptr<Transport> copies = makeThreadsTransport(1);
    const tests::BoundRanks wanted = tests::runAllRanks(*plan, 1, *copies);
    std::map<uint32_t, std::unique_ptr<tests::BoundRank>> ranks;
    std::map<uint32_t, std::vector<LocalRank>> locals; // outlive the transports
    std::map<uint32_t, std::unique_ptr<PullTransport>> transports;
    for (uint32_t rank = 0; rank < 3 + 3 * 2; ++rank) {
      transports[rank] = std::make_unique<PullTransport>(
          PullOptions{.fleet = fleet,
                      .worldRank = rank,
                      .store = &store,
                      .job = {.name = form, .plan = plan->digest(), .rank = rank, .size = 1, .authenticator = {}},
                      .open = [this]() -> Result<std::unique_ptr<Messenger>> { return network.open("host"); },
                      .rangeBytes = 1000});
      ranks[rank] = std::make_unique<tests::BoundRank>(*plan, fleet.planRank(rank), 1);
      ASSERT_EQ(ranks[rank]->bind(*plan, *transports[rank]).message(), "");
      locals[rank] = {ranks[rank]->local};
      ASSERT_EQ(transports[rank]->prepare(*plan, locals[rank], deadlineIn(10)).message(), "");
    }
    for (uint32_t rank = 0; rank < 3; ++rank)
      ASSERT_EQ(transports[rank]->publish(1, none).message(), "");
    tests::onThreads(3 * 2, [&](uint32_t number) {
      const uint32_t rank = 3 + number;
      const Result<uint64_t> version = transports[rank]->pull({0, deadlineIn(10), none, none});
      EXPECT_EQ(version.status().message(), "");
      EXPECT_TRUE(ranks[rank]->memory() == wanted[fleet.planRank(rank)]->memory()) << fleet.name(rank);
    });
    transports.clear();
  }
}

} // namespace
