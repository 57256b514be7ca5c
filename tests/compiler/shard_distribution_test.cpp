// What Megatron-Core's `distribute_shards_to_ranks` gives for tp 2 (rank = tp + 2 dp, groups along dp) where shards are
// read across groups: a read of another group's shard is assigned last and changes no other assignment. Main replicas
// are stated here; the compiler takes the lowest rank, which for d and f this row does not.

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

/// {tensor: the ranks elected}; writing, only the main replica's group takes part.
std::map<std::string, std::vector<int32_t>> elected(bool read) {
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

TEST(ShardDistribution, SavesByTheMainReplicasGroup) {
  const std::map<std::string, std::vector<int32_t>> expected = {{"a", {0}}, {"b", {4}}, {"c", {2}}, {"d", {1}},
                                                                {"e", {5}}, {"f", {1}}, {"g", {7}}};
  EXPECT_EQ(elected(false), expected);
}

TEST(ShardDistribution, CrossReadsComeLast) {
  // As saved, and besides rank 0 reads d and f for its group, rank 3 b.
  const std::map<std::string, std::vector<int32_t>> expected = {{"a", {0}}, {"b", {3, 4}}, {"c", {2}}, {"d", {0, 1}},
                                                                {"e", {5}}, {"f", {0, 1}}, {"g", {7}}};
  EXPECT_EQ(elected(true), expected);
}

} // namespace
