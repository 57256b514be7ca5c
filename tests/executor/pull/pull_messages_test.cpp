// SPDX-License-Identifier: Apache-2.0
// The messages of pull mode: ranges are packed out of the memory of sources and replicas, and unpacked, in any order
// that the tables allow; every replica gets what transport `threads` moves.

#include "executor/pull/message_table.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::pull;
using tests::RankMemory;

namespace {

const std::string &kModel = tests::detail::kRelayModel;
const std::string kJobs[] = {
    kModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3}, ranks: 2..4, replicas: 4}\n",
    // One rank of a node receives and forwards.
    kModel + "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2, dp: 4}, ranks: 8..15, replicas: 3}\noptions: {topology: "
             "{ranks_per_node: 8}}\n",
    kModel + "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2, dp: 4}, ranks: 8..15, replicas: 3}\noptions: {staging: "
             "8KiB, topology: "
             "{ranks_per_node: 8}}\n",
};

/// A rank of the fleet, with its progress.
struct Member {
  Member(const Plan &plan, const Fleet &fleet, uint32_t rank) : worldRank(rank), memory(plan, fleet.planRank(rank)) {
    EXPECT_EQ(table.build(plan, fleet, memory.local, rank).message(), "");
    progress = std::make_unique<PullProgress>(table.received().size());
  }
  bool done() const {
    for (size_t m = 0; m < table.received().size(); ++m)
      if (progress->confirmed(m) < table.received()[m].packing.bytes())
        return false;
    return progress->locals() == table.locals().size();
  }
  uint32_t worldRank;
  RankMemory memory;
  MessageTable table;
  std::unique_ptr<PullProgress> progress;
  size_t copies = 0;
};

/// Copies a random range of a random message, if it is there. The replicas form a chain.
void step(std::vector<std::unique_ptr<Member>> &members, const Fleet &fleet, std::mt19937_64 &random, int &parked) {
  Member &member = *members[random() % members.size()];
  if (const uint32_t next = member.progress->locals(); next < member.table.locals().size()) {
    const LocalStep &local = member.table.locals()[next];
    if (std::all_of(local.received.begin(), local.received.end(), [&](size_t m) {
          return member.progress->confirmed(m) == member.table.received()[m].packing.bytes();
        })) {
      for (; member.copies < local.end; ++member.copies)
        member.table.copies().run(member.copies, false);
      member.progress->setLocals(next + 1);
    }
  }
  if (member.table.received().empty())
    return;
  const size_t m = random() % member.table.received().size();
  ReceivedMessage &message = member.table.received()[m];
  const uint64_t begin = member.progress->confirmed(m), left = message.packing.bytes() - begin;
  if (left == 0 || member.progress->locals() < message.localsBefore)
    return;
  const uint64_t end = begin + 1 + random() % std::min<uint64_t>(left, 5000);
  const uint32_t replica = fleet.replicaOf(member.worldRank), mesh = fleet.meshRankOf(member.worldRank);
  uint32_t from = message.sender;
  if (fleet.isTarget(from))
    from = fleet.worldRank(replica, fleet.meshRankOf(from));
  else if (replica > 0)
    from = fleet.worldRank(replica - 1, mesh);
  const auto server = std::find_if(members.begin(), members.end(), [&](auto &each) { return each->worldRank == from; });
  ServedMessage served;
  ASSERT_EQ((*server)->table.find(message.message, member.worldRank, served), MessageTable::Serves::yes);
  ASSERT_EQ(served.packing->bytes(), message.packing.bytes());
  if (!MessageTable::ready(served, begin, end, *(*server)->progress)) {
    ++parked;
    return;
  }
  std::vector<std::byte> packed(end - begin);
  served.packing->pack(begin, end, packed.data());
  message.packing.unpack(begin, end, packed.data());
  member.progress->confirm(m, end);
}

TEST(PullMessages, RangesInAnyOrderGiveEveryReplicaTheBytesOfTheSources) {
  for (const std::string &job : kJobs) {
    SCOPED_TRACE(job);
    const std::unique_ptr<Plan> plan = tests::compiledPlan(job);
    const tests::Ranks expected = tests::copied(*plan, 5);
    const Result<Fleet> fleet = Fleet::of(*plan);
    ASSERT_EQ(fleet.status().message(), "");
    std::vector<std::unique_ptr<Member>> members;
    for (const uint32_t rank : fleet->sources())
      members.push_back(std::make_unique<Member>(*plan, *fleet, rank));
    for (uint32_t i = 0; i < 3 * fleet->replicaRanks(); ++i)
      members.push_back(std::make_unique<Member>(*plan, *fleet, fleet->worldRank(0, i)));
    for (auto &member : members)
      member->memory.fill(5);
    std::mt19937_64 random(3);
    int parked = 0;
    auto all = [&] { return std::all_of(members.begin(), members.end(), [](auto &each) { return each->done(); }); };
    for (int turn = 0; turn < 2'000'000 && !all(); ++turn)
      step(members, *fleet, random, parked);
    EXPECT_TRUE(all());
    EXPECT_GT(parked, 0);
    for (const auto &member : members)
      EXPECT_TRUE(member->memory.bytes() == expected[fleet->planRank(member->worldRank)]->bytes())
          << fleet->name(member->worldRank);
  }
}

TEST(PullMessages, OnlyTheRanksOfAMessageObtainIt) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(kJobs[1]);
  const Result<Fleet> fleet = Fleet::of(*plan);
  ASSERT_TRUE(fleet.ok());
  EXPECT_EQ(fleet->name(17), "replica 1 rank 1 (world rank 17)");
  EXPECT_EQ(fleet->name(2), "source rank 2 (world rank 2)");
  std::map<uint32_t, std::pair<uint32_t, uint32_t>> ends; // message -> sender and receiver
  std::vector<std::unique_ptr<Member>> members;
  for (uint32_t rank = 0; rank < plan->world(); ++rank) {
    members.push_back(std::make_unique<Member>(*plan, *fleet, rank));
    for (const ReceivedMessage &message : members.back()->table.received())
      ends[message.message] = {message.sender, rank};
  }
  ServedMessage served;
  for (const auto &member : members)
    for (const auto &[message, pair] : ends)
      for (uint32_t client = 0; client < 32; ++client) {
        if (!fleet->isTarget(member->worldRank) && member->worldRank > 3)
          continue; // ranks of the plan that no endpoint has
        const auto [sender, receiver] = pair;
        const bool sends = member->worldRank == sender && client >= 8 && fleet->planRank(client) == receiver &&
                           (sender < 8 || fleet->replicaOf(client) == 0);
        const bool holds = member->worldRank == receiver && client >= 16 && fleet->planRank(client) == receiver;
        EXPECT_EQ(member->table.find(message, client, served) == MessageTable::Serves::yes, sends || holds)
            << "message " << message << " rank " << member->worldRank << " client " << client;
      }
}

TEST(PullMessages, APlanThatIsNotForPullModeIsInvalid) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(kModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2}}\n");
  EXPECT_EQ(Fleet::of(*plan).status().message(), "pull mode needs a plan whose target has `replicas`, found none");
}

} // namespace
