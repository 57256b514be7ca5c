// SPDX-License-Identifier: Apache-2.0
// The coordinator of pull mode, request by request.

#include "executor/pull/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>

using namespace reshard::pull;

namespace {

using Answer = CoordinatorAnswer;
const auto kLater = Coordinator::Clock::time_point::max();

class PullCoordinator : public testing::Test {
protected:
  void make(uint32_t sources, uint32_t replicaRanks) { coordinator.emplace(FleetShape{sources, replicaRanks}); }
  void publish(uint64_t version, uint64_t incarnation = 1) { coordinator->published(0, {incarnation, version}); }
  /// Client 10 * replica + rank + 1.
  static uint64_t client(uint32_t replica, uint32_t rank = 0) { return 10 * replica + rank + 1; }
  void begin(uint32_t replica, uint32_t rank = 0, uint64_t call = 1, uint64_t least = 0, uint64_t failed = 0) {
    coordinator->begin(client(replica, rank), {replica, rank, least, call, failed}, kLater);
  }
  /// The answers since the last call, as text: "client:assign VERSION from PARENT".
  std::string answers() {
    std::string text;
    while (const std::optional<Answer> answer = coordinator->next()) {
      text += (text.empty() ? "" : ", ") + std::to_string(answer->client) + ":";
      const std::string version = " " + std::to_string(answer->version.number);
      if (answer->kind == Answer::kAssign) {
        assignment[answer->client] = answer->assignment;
        text +=
            "assign" + version + " from " + (answer->parent == kSources ? "sources" : std::to_string(answer->parent));
      } else if (answer->kind == Answer::kWaiting) {
        text += "waiting" + version + " for " + (answer->rank == kSources ? "any" : std::to_string(answer->rank));
      } else {
        text += answer->kind == Answer::kCommitted ? "committed" + version
                : answer->kind == Answer::kRepeat  ? "repeat"
                                                   : "replaced";
      }
    }
    return text;
  }
  void complete(uint32_t replica, uint32_t rank = 0) {
    coordinator->complete(client(replica, rank), assignment[client(replica, rank)]);
  }
  std::string states() const {
    std::string text;
    for (const ReplicaInfo &info : coordinator->replicas(now))
      text += (text.empty() ? "" : ", ") + std::to_string(info.replica) + ": " +
              (info.state == ReplicaInfo::kPulling    ? "pulling "
               : info.state == ReplicaInfo::kComplete ? "complete "
                                                      : "lost ") +
              std::to_string(info.version) + " ranks " + std::to_string(info.ranks);
    return text;
  }

  std::optional<Coordinator> coordinator;
  Coordinator::Clock::time_point now = Coordinator::Clock::now();
  std::map<uint64_t, uint64_t> assignment; // by client
};

TEST_F(PullCoordinator, AVersionIsAvailableWhenAllSourceRanksHavePublishedIt) {
  make(2, 1);
  begin(0);
  EXPECT_EQ(answers(), "1:waiting 0 for 0");
  coordinator->published(1, {1, 5});
  EXPECT_EQ(answers(), "1:waiting 5 for 0");
  coordinator->published(2, {1, 5}); // there is no such rank
  EXPECT_EQ(answers(), "");
  coordinator->published(0, {1, 5});
  EXPECT_EQ(answers(), "1:assign 5 from sources");
  begin(1, 0, 1, 6);
  EXPECT_EQ(answers(), "11:waiting 5 for any");
  coordinator->published(1, {1, 0});
  EXPECT_EQ(answers(), "11:waiting 5 for 1");
}

TEST_F(PullCoordinator, AllRanksOfAReplicaCommitTheSameVersion) {
  make(1, 2);
  publish(3);
  begin(0, 0);
  begin(0, 1);
  EXPECT_EQ(answers(), "1:assign 3 from sources, 2:assign 3 from sources");
  complete(0, 0);
  EXPECT_EQ(answers(), "");
  EXPECT_EQ(states(), "0: pulling 3 ranks 2");
  complete(0, 1);
  EXPECT_EQ(answers(), "1:committed 3, 2:committed 3");
  EXPECT_EQ(states(), "0: complete 3 ranks 2");
  // The answer of rank 0 was lost: the same call obtains it again.
  begin(0, 0);
  EXPECT_EQ(answers(), "1:assign 3 from sources");
  complete(0, 0);
  EXPECT_EQ(answers(), "1:committed 3");
  // The same after the other rank has ended.
  coordinator->lost(client(0, 1));
  coordinator->lost(client(0, 0));
  begin(0, 0);
  complete(0, 0);
  EXPECT_EQ(answers(), "1:assign 3 from sources, 1:committed 3");
  // The next call of both.
  publish(4);
  begin(0, 1, 2);
  begin(0, 0, 2);
  EXPECT_EQ(answers(), "2:assign 4 from sources, 1:assign 4 from sources");
}

TEST_F(PullCoordinator, AFailedAssignmentIsRepeatedByAllRanks) {
  make(1, 2);
  publish(3);
  begin(0, 0);
  begin(0, 1);
  answers();
  complete(0, 0);
  publish(0);
  begin(0, 1, 1, 0, assignment[client(0, 1)]);
  EXPECT_EQ(answers(), "2:waiting 0 for 0");
  publish(4);
  EXPECT_EQ(answers(), "1:repeat, 2:assign 4 from sources");
  begin(0, 0);
  EXPECT_EQ(answers(), "1:assign 4 from sources");
  complete(0, 1);
  complete(0, 0);
  EXPECT_EQ(answers(), "1:committed 4, 2:committed 4");
}

TEST_F(PullCoordinator, ARankThatNeedsANewerVersionTakesTheOthersWithIt) {
  make(1, 2);
  publish(3);
  begin(0, 0);
  EXPECT_EQ(answers(), "1:assign 3 from sources");
  begin(0, 1, 1, 4);
  EXPECT_EQ(answers(), "2:waiting 3 for any");
  complete(0, 0);
  publish(5);
  EXPECT_EQ(answers(), "1:repeat, 2:assign 5 from sources");
}

TEST_F(PullCoordinator, ALateCompleteOfAnEarlierAssignmentIsRepeated) {
  make(1, 1);
  publish(3);
  begin(0);
  answers();
  const uint64_t first = assignment[client(0)];
  publish(4);
  begin(0, 0, 1, 0, first);
  EXPECT_EQ(answers(), "1:assign 4 from sources");
  coordinator->complete(client(0), first);
  EXPECT_EQ(answers(), "1:repeat");
}

TEST_F(PullCoordinator, ReplicasFormAChain) {
  make(1, 1);
  publish(1);
  for (uint32_t replica = 0; replica < 4; ++replica)
    begin(replica);
  EXPECT_EQ(answers(), "1:assign 1 from sources, 11:assign 1 from 0, 21:assign 1 from 1, 31:assign 1 from 2");
  // A first replica that is done makes room at the sources; later, one that holds the version is as near as they are.
  complete(0);
  begin(4);
  begin(5);
  EXPECT_EQ(answers(), "1:committed 1, 41:assign 1 from sources, 51:assign 1 from 4");
}

TEST_F(PullCoordinator, AVersionOfSourcesThatStartedAgainIsAnother) {
  make(1, 1);
  publish(3);
  begin(0);
  complete(0, 0);
  answers();
  complete(0, 0);
  EXPECT_EQ(answers(), "1:committed 3");
  publish(0);
  publish(3, 2);
  begin(1);
  begin(2);
  EXPECT_EQ(answers(), "11:assign 3 from sources, 21:assign 3 from 1"); // not from 0, which has the earlier bytes
  begin(0, 0, 2);
  EXPECT_EQ(answers(), "1:assign 3 from 2");
}

TEST_F(PullCoordinator, ACompleteOfAClientThatHasNotBegunIsRepeated) {
  make(1, 1);
  publish(3);
  begin(0);
  answers();
  coordinator->complete(77, assignment[client(0)]); // the process of client 1 has connected again
  EXPECT_EQ(answers(), "77:repeat");
}

TEST_F(PullCoordinator, ALostOrSilentReplicaIsNoParent) {
  make(1, 2);
  publish(1);
  begin(0, 0);
  begin(0, 1);
  answers();
  coordinator->lost(client(0, 1));
  EXPECT_EQ(states(), "0: lost 1 ranks 1");
  begin(1);
  EXPECT_EQ(answers(), "11:assign 1 from sources");
  begin(2);
  EXPECT_EQ(answers(), "21:assign 1 from 1");
  coordinator->parentFailed(client(2), 1);
  begin(2, 1); // the other rank of the replica
  EXPECT_EQ(answers(), "22:assign 1 from sources");
  begin(3);
  EXPECT_EQ(answers(), "31:assign 1 from 2");
  coordinator->seen(client(1), now);
  begin(4);
  EXPECT_EQ(answers(), "41:assign 1 from 1");
  EXPECT_EQ(states(), "0: lost 1 ranks 1, 1: pulling 1 ranks 1, 2: pulling 1 ranks 2, 3: pulling 1 ranks 1, 4: pulling "
                      "1 ranks 1");
  now += std::chrono::seconds(6);
  EXPECT_THAT(states(), testing::HasSubstr("1: lost 1 ranks 1"));
  coordinator->seen(client(1), now);
  begin(1, 1);
  begin(0, 1); // replica 0 has all its ranks again
  EXPECT_EQ(answers(), "12:assign 1 from sources, 2:assign 1 from sources");
  EXPECT_THAT(states(), testing::HasSubstr("0: pulling 1 ranks 2, 1: pulling 1 ranks 2, 2: pulling 1 ranks 2"));
}

TEST_F(PullCoordinator, AProcessThatStartsAgainTakesItsRank) {
  make(1, 1);
  publish(1);
  begin(0);
  complete(0);
  answers();
  coordinator->begin(99, {0, 0, 0, 1, 0}, kLater);
  EXPECT_EQ(answers(), "1:replaced, 99:assign 1 from sources");
  coordinator->lost(client(0)); // the end of the old process is noticed late
  EXPECT_EQ(states(), "0: pulling 1 ranks 1");
}

TEST_F(PullCoordinator, ARankThatConnectsAgainResumesTheCommittedVersion) {
  make(1, 2);
  publish(1);
  begin(0, 0);
  begin(0, 1);
  answers();
  complete(0, 0);
  complete(0, 1);
  answers();
  coordinator->lost(client(0, 0));
  EXPECT_EQ(states(), "0: lost 1 ranks 1");
  coordinator->resume(99, 0, 0, 1);
  EXPECT_EQ(states(), "0: complete 1 ranks 2");
  coordinator->resume(98, 0, 1, 1); // before the end of the old connection is noticed
  coordinator->lost(client(0, 1));
  EXPECT_EQ(states(), "0: complete 1 ranks 2");
  begin(1, 0);
  begin(2, 0);
  EXPECT_EQ(answers(), "11:assign 1 from sources, 21:assign 1 from 0");
  // The other rank has begun another assignment, or there is none.
  coordinator->lost(99);
  publish(2);
  coordinator->begin(98, {0, 1, 0, 5, 0}, kLater);
  answers();
  coordinator->resume(99, 0, 0, 1);
  coordinator->resume(99, 0, 0, 0);
  coordinator->resume(99, 0, 7, 1);
  coordinator->resume(99, 7, 0, 1);
  EXPECT_THAT(states(), testing::StartsWith("0: lost 2 ranks 1"));
}

TEST_F(PullCoordinator, RequestsEndWithTheirClientsAndDeadlines) {
  make(1, 1);
  coordinator->begin(1, {0, 0, 0, 1, 0}, now);
  begin(1);
  answers();
  coordinator->expire(now);
  coordinator->lost(client(1));
  publish(1);
  EXPECT_EQ(answers(), "");
  coordinator->begin(5, {0, 1, 0, 1, 0}, kLater); // a replica has one rank
  coordinator->complete(5, 1);
  coordinator->parentFailed(5, 0);
  coordinator->lost(5);
  EXPECT_EQ(answers(), "5:repeat");
}

/// With random requests, failures and losses, a replica commits only if all its ranks completed one assignment, and no
/// chain is a cycle.
TEST_F(PullCoordinator, RandomEventsKeepTheRules) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    make(2, 2);
    assignment.clear();
    std::map<uint64_t, std::map<uint64_t, bool>> completed; // assignment, client
    std::set<uint64_t> committed;                           // assignments
    std::map<uint32_t, uint32_t> parents;                   // of the replicas that pull
    uint64_t version = 1;
    for (int step = 0; step < 200; ++step) {
      const uint32_t replica = random() % 5, rank = random() % 2;
      switch (random() % 6) {
      case 0:
        coordinator->published(random() % 2, {1 + random() % 2, random() % 4 ? version : version += random() % 2});
        break;
      case 1:
      case 2:
        begin(replica, rank, 1 + random() % 3, random() % 3, random() % 4 ? 0 : assignment[client(replica, rank)]);
        break;
      case 3:
      case 4:
        completed[assignment[client(replica, rank)]][client(replica, rank)] = true;
        complete(replica, rank);
        break;
      default:
        if (const uint32_t parent = random() % 5; random() % 2) {
          coordinator->lost(client(replica, rank));
        } else {
          coordinator->parentFailed(client(replica, rank), parent);
          if (const auto found = parents.find(replica); found != parents.end() && found->second == parent)
            found->second = kSources;
        }
      }
      while (const std::optional<Answer> answer = coordinator->next()) {
        if (answer->kind == Answer::kAssign) {
          assignment[answer->client] = answer->assignment;
          if (!committed.contains(answer->assignment)) // else the answer is repeated
            parents[answer->client / 10] = answer->parent;
        }
        if (answer->kind == Answer::kCommitted) {
          committed.insert(answer->assignment);
          parents.erase(answer->client / 10); // it has all bytes
          EXPECT_NE(answer->assignment, 0u);
          EXPECT_EQ(completed[answer->assignment].size(), 2u);
        }
      }
      for (const auto &[first, parent] : parents) {
        size_t length = 0;
        for (auto at = parents.find(first); at != parents.end(); at = parents.find(at->second))
          ASSERT_LE(++length, parents.size()) << "replica " << first << " reads from itself";
      }
    }
  }
}

} // namespace
