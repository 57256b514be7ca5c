// SPDX-License-Identifier: Apache-2.0
// Compares assignShards with the results of Megatron-Core's `distribute_shards_to_ranks` for tp 2 (rank = tp + 2 dp,
// groups along dp) if shards are read across groups: a read of another group's shard is assigned last and does not
// change the other assignments. The test states the main replicas; for d and f they are not the lowest ranks, which the
// compiler would choose.

#include "compiler/transfer/shard_distribution.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

using namespace reshard;

namespace {

struct Placement {
  std::string name;
  std::vector<int32_t> replicas; // the main replica first
};
const std::vector<Placement> kPlacements = {
    {"a", {0}}, {"b", {0, 1, 2, 3, 4, 5, 6, 7}}, {"c", {0, 2, 4}}, {"d", {1, 0, 7}}, {"e", {1, 5}}, {"f", {1, 0, 5}},
    {"g", {7}}};

/// The ranks that read (or write) each tensor. Only the group of the main replica writes.
std::map<std::string, std::vector<int32_t>> assigned(bool read) {
  ir::Layout layout;
  layout.world = 8;
  ir::Transfers transfers;
  std::vector<Shard> shards;
  for (uint32_t t = 0; t < kPlacements.size(); ++t) {
    ir::TensorPattern pattern;
    pattern.name = kPlacements[t].name;
    layout.tensorPatterns.push_back(pattern);
    ir::Overlap overlap;
    overlap.pattern = static_cast<int>(t);
    transfers.overlaps.push_back(overlap);
    for (const int64_t group : {0, 1}) {
      Shard shard;
      shard.overlap = t;
      shard.group = group;
      shard.cross = kPlacements[t].replicas[0] % 2 != group;
      shard.bytes = 4;
      for (int32_t rank : kPlacements[t].replicas)
        if (rank % 2 == group)
          shard.replicas.push_back(rank);
      std::sort(shard.replicas.begin(), shard.replicas.end());
      if (!shard.replicas.empty() && (read || !shard.cross))
        shards.push_back(shard);
    }
  }
  assignShards(layout, transfers, shards);
  std::map<std::string, std::vector<int32_t>> result;
  for (const Shard &shard : shards)
    result[kPlacements[shard.overlap].name].push_back(shard.rank);
  for (auto &[name, ranks] : result)
    std::sort(ranks.begin(), ranks.end());
  return result;
}

TEST(ShardDistribution, GroupOfTheMainReplicaWrites) {
  const std::map<std::string, std::vector<int32_t>> expected = {{"a", {0}}, {"b", {4}}, {"c", {2}}, {"d", {1}},
                                                                {"e", {5}}, {"f", {1}}, {"g", {7}}};
  EXPECT_EQ(assigned(false), expected);
}

TEST(ShardDistribution, AssignsReadsOfOtherGroupsLast) {
  // As in the test above; in addition rank 0 reads d and f for its group, and rank 3 reads b.
  const std::map<std::string, std::vector<int32_t>> expected = {{"a", {0}}, {"b", {3, 4}}, {"c", {2}}, {"d", {0, 1}},
                                                                {"e", {5}}, {"f", {0, 1}}, {"g", {7}}};
  EXPECT_EQ(assigned(true), expected);
}

} // namespace
