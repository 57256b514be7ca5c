// SPDX-License-Identifier: Apache-2.0
// Checked pulls: digests of the sources against the memory of a replica.

#include "tests/executor/pull_case.h"

#include <gmock/gmock.h>

using namespace reshard;
using namespace reshard::pull;
using testing::HasSubstr;

namespace {

/// More tensors than one frame has digests.
const std::string kMany =
    "version: 1\nmodel: {dtype: bf16, index: {l: 200}, tensors: {\"r.{l}\": {shape: [4, 3], shard: {0: tp}}}}\n"
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2}, ranks: 2..3, replicas: 4}\n";

using PullCheckTest = PullCase;

TEST_F(PullCheckTest, ACheckedPullComparesTheDigestsOfTheSources) {
  for (const std::string &job : {kPairs, kMany}) {
    SCOPED_TRACE(job.size());
    compile(job);
    startSources();
    for (const uint32_t replica : {0, 1, 2})
      startReplica(replica);
    for (const uint64_t version : {1, 2}) {
      publish(version);
      const std::string all = std::to_string(version) + " " + std::to_string(version);
      tests::onThreads(3, [&](uint32_t replica) { // two of them read from replicas
        EXPECT_EQ(pullReplica(replica, version, 10, true), all);
      });
      EXPECT_EQ(pullReplica(0, version, 10, true), all); // moves nothing
      release();
    }
    end();
  }
}

/// Whatever went wrong on the way: the memory is not what the sources had when they published.
TEST_F(PullCheckTest, ACheckedPullFindsWrongBytesAndTheNextOneMovesThemAgain) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  EXPECT_EQ(pullReplica(0), "1 1");
  std::byte &element = processes[2]->memory.local.memory[0][1][0]; // param 0, instance 1
  element ^= std::byte{1};
  const Result<uint64_t> wrong = pull(2, 1, 10, true);
  EXPECT_EQ(wrong.status().message(), "the memory of replica 0 rank 0 (world rank 2) differs from version 1 of the "
                                      "source: wrong are the tensors 'r.1'");
  EXPECT_EQ(wrong.status().kind(), ErrorKind::failed);
  writes = 0;
  EXPECT_EQ(pullReplica(0, 1, 10, true), "1 1"); // compares the bytes with those of the version
  EXPECT_EQ(writes, 1);                          // rank 2

  // The sources' memory changes after their digests were computed.
  release();
  publish(2);
  std::byte &source = processes[1]->memory.local.memory[1][0][5];
  source ^= std::byte{1};
  EXPECT_THAT(pull(3, 2, 10, true).status().message(), HasSubstr("of the source: wrong are the tensors 'c.0'"));
  source ^= std::byte{1};
  EXPECT_EQ(pullReplica(0, 2, 10, true), "2 2");
}

TEST_F(PullCheckTest, ACheckOfAVersionWithoutDigestsFails) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(0, 1);
  publishWithoutDigests(1, 1);
  EXPECT_EQ(pull(3, 1, 10, true).status().message(),
            "version 1 cannot be checked: source rank 1 (world rank 1) has published it without digests");
  EXPECT_EQ(writes, 0);
  EXPECT_EQ(pullReplica(0), "1 1");
}

/// A replica that holds version 1 asks for its digests while the sources publish version 2.
TEST_F(PullCheckTest, ACheckOfAVersionThatIsReplacedPullsTheNextOne) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  EXPECT_EQ(pullReplica(0), "1 1");
  EXPECT_TRUE(soon([&] { return processes[1]->transport->leases() == 0; })); // else release would wait for one
  freeze(1);                                                                 // the coordinator, rank 0, answers
  std::thread puller([&] { EXPECT_EQ(pullReplica(0, 1, 20, true), "2 2"); });
  EXPECT_TRUE(soon([&] { // the pull has begun, with version 1
    const std::optional<ReplicaInfo> info = onlyReplica(0);
    return info && info->state == ReplicaInfo::kPulling;
  }));
  release();
  publish(2);
  freeze(1, false);
  puller.join();
}

/// The parent of replica 1 has wrong bytes, which it does not know.
TEST_F(PullCheckTest, AReplicaWhoseParentHasWrongBytesReadsFromTheSourcesNextTime) {
  compile(kPairs);
  startSources();
  for (const uint32_t replica : {0, 1})
    startReplica(replica);
  publish(1);
  // Rank 0 of replica 0 has its bytes and waits for rank 1, so replica 0 still pulls, and is the parent of replica 1.
  std::thread first([&] { EXPECT_FALSE(pull(2, 0, 4, true).ok()); });
  EXPECT_TRUE(soon([&] { return comparisons == 1; }));
  processes[2]->memory.local.memory[0][0][3] ^= std::byte{1};
  EXPECT_EQ(pull(4, 1, 3, true).status().message(),
            "the memory of replica 1 rank 0 (world rank 4) differs from version 1 of the source: wrong are the tensors "
            "'r.0'; it has read from replica 0");
  EXPECT_EQ(pullReplica(1, 1, 10, true), "1 1");
  first.join();
}

/// Its comparison ends, and later attempts of the call to complete the version do not repeat it.
TEST_F(PullCheckTest, ACallComparesAVersionOnce) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  std::thread late([&] { EXPECT_EQ(pull(2, 1, 20, true).status().message(), ""); });
  EXPECT_TRUE(soon([&] { return comparisons == 1; }));
  for (int i = 0; i < 3; ++i) // rank 0 of the replica begins again each time
    for (const bool isCut : {true, false}) {
      cut(2, isCut);
      EXPECT_TRUE(soon([&] {
        const std::optional<ReplicaInfo> info = onlyReplica();
        return info && info->ranks == (isCut ? 0u : 1u);
      }));
    }
  EXPECT_EQ(pull(3, 1, 10).status().message(), "");
  late.join();
  EXPECT_EQ(comparisons, 1);
}

/// It is about a version that was published without digests, and arrives during a call for the next version.
TEST_F(PullCheckTest, ALateAnswerToAnEarlierCallIsDropped) {
  compile(kPairs);
  startSources();
  startReplica(0);
  for (const uint32_t rank : fleet.sources())
    publishWithoutDigests(rank, 1);
  EXPECT_EQ(pullReplica(0), "1 1");
  freeze(1);
  EXPECT_THAT(pull(3, 1, 0.2, true).status().message(), HasSubstr("waited for the digests of version 1"));
  freeze(1, false);
  EXPECT_EQ(pull(3, 2, 0.3, true).status().message(),
            "timed out: no source has published version >= 2; the newest is 1");
  release();
  publish(2);
  EXPECT_EQ(pullReplica(0, 2, 10, true), "2 2");
}

/// A trainer that starts again gives other weights the same number.
TEST_F(PullCheckTest, ASourceThatStartsAgainGivesTheDigestsOfItsOwnVersion) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(4);
  EXPECT_EQ(pullReplica(0, 4, 10, true), "4 4");
  startSources();
  publishAgain(4);
  EXPECT_EQ(pullReplica(0, 4, 10, true), "4 4");
}

TEST_F(PullCheckTest, ACheckWaitsForASourceUntilItsDeadline) {
  compile(kPairs);
  startSources();
  startReplica(0);
  publish(1);
  EXPECT_EQ(pullReplica(0), "1 1");
  freeze(1);
  EXPECT_EQ(pull(3, 1, 0.3, true).status().message(),
            "timed out: waited for the digests of version 1 from source rank 1 (world rank 1)");
  freeze(1, false);
  EXPECT_EQ(pullReplica(0, 1, 10, true), "1 1");
}

} // namespace
