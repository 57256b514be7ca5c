// SPDX-License-Identifier: Apache-2.0
// Which mesh ranks of a job are copies of others.

#include "ir/copies.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::ir;

namespace {

constexpr int64_t kRows = 48;

/// A side with one param of kRows rows, which are divided over some of the axes.
Endpoint side(std::vector<Axis> axes, std::vector<unsigned> over, int32_t firstRank) {
  Endpoint endpoint;
  int64_t meshRanks = 1, shards = 1;
  for (const Axis &axis : axes)
    meshRanks = std::max(meshRanks, axis.stride * axis.size);
  for (unsigned axis : over)
    shards *= axes[axis].size;
  endpoint.axes = std::move(axes);
  for (int32_t meshRank = 0; meshRank < meshRanks; ++meshRank)
    endpoint.ranks.push_back(firstRank + meshRank);
  Sharding sharding;
  sharding.axes = std::move(over);
  for (int64_t shard = 0; shard < shards; ++shard)
    sharding.at.push_back({{shard * kRows / shards, 0, kRows / shards, 1, 0, 0}});
  endpoint.shardings = {sharding};
  Param param;
  param.name = "w";
  param.shape = {{{}, {kRows / shards}}};
  param.parts = {{0, {{0, 0}}}};
  endpoint.params = {param};
  return endpoint;
}

Layout job(Endpoint source, Endpoint target) {
  Layout layout;
  layout.foldsCopies = true;
  for (const Endpoint *endpoint : {&source, &target})
    for (int32_t rank : endpoint->ranks)
      layout.world = std::max<int64_t>(layout.world, rank + 1);
  layout.endpoints = {std::move(source), std::move(target)};
  return layout;
}

/// The numbers of copies of the source, and of the target for each of them.
std::pair<int64_t, int64_t> counts(const Layout &layout) {
  const Copies copies(layout);
  return {copies.sources(), copies.each()};
}

using Counts = std::pair<int64_t, int64_t>;
const Endpoint kSharded = side({{"fsdp", 4, 1}}, {0}, 0);
const Endpoint kReplicated = side({{"tp", 2, 1}, {"dp", 6, 2}}, {0}, 0);

} // namespace

TEST(Copies, OfTheTarget) {
  EXPECT_EQ(counts(job(kSharded, side({{"tp", 2, 1}, {"dp", 3, 2}}, {0}, 4))), Counts(1, 3));
  EXPECT_EQ(counts(job(kSharded, side({{"dp", 3, 1}, {"tp", 2, 3}}, {1}, 4))), Counts(1, 3)) << "inside";
  EXPECT_EQ(counts(job(kSharded, side({{"dp", 3, 1}, {"tp", 2, 3}, {"copy", 2, 6}}, {1}, 4))), Counts(1, 6)) << "both";
  EXPECT_EQ(counts(job(kSharded, side({{"tp", 2, 1}}, {0}, 4))), Counts(1, 1));
}

TEST(Copies, OfBothSides) {
  EXPECT_EQ(counts(job(kReplicated, side({{"tp", 2, 1}, {"dp", 6, 2}}, {0}, 12))), Counts(6, 1));
  EXPECT_EQ(counts(job(kReplicated, side({{"tp", 2, 1}, {"dp", 4, 2}}, {0}, 12))), Counts(2, 1))
      << "the replicas of a copy of the source share the targets of the copy";
  EXPECT_EQ(counts(job(kReplicated, side({{"tp", 2, 1}, {"dp", 5, 2}}, {0}, 12))), Counts(1, 1));
  EXPECT_EQ(counts(job(side({{"tp", 2, 1}, {"dp", 2, 2}}, {0}, 0), side({{"tp", 2, 1}, {"dp", 6, 2}}, {0}, 4))),
            Counts(2, 1));
}

// An axis of another view of the mesh covers a part of the replicas: only the rest are copies.
TEST(Copies, WithViews) {
  const Endpoint target = side({{"tp", 2, 1}, {"dp", 12, 2}, {"ep", 8, 1}}, {0}, 4);
  EXPECT_EQ(counts(job(kSharded, target)), Counts(1, 12));
  Endpoint experts = target;
  experts.params[0].presence = {{2, {0, 3}}};
  EXPECT_EQ(counts(job(kSharded, experts)), Counts(1, 3));
  experts = target;
  experts.axes[2] = {"ep", 3, 1}; // 3 and 2 are no multiples: the strides do not nest
  experts.params[0].presence = {{2, {0}}};
  EXPECT_EQ(counts(job(kSharded, experts)), Counts(1, 1));
}

TEST(Copies, None) {
  const Layout layout = job(kSharded, side({{"tp", 2, 1}, {"dp", 3, 2}}, {0}, 4));
  auto without = [&](auto change) {
    Layout changed = layout;
    change(changed);
    return counts(changed);
  };
  EXPECT_EQ(without([](Layout &) {}), Counts(1, 3));
  EXPECT_EQ(without([](Layout &l) { l.foldsCopies = false; }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.topology.ranksPerNode = 2; }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.endpoints[0].storage = true; }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.endpoints[1].epochs = {0, 0, 0, 0, 1, 1}; }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.endpoints[1].ranks[0] = 3; }), Counts(1, 1)) << "a rank of both sides";
  EXPECT_EQ(without([](Layout &l) { l.endpoints[1].replicas = 2; }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.endpoints[1].params[0].view.emplace(); }), Counts(1, 1));
  EXPECT_EQ(without([](Layout &l) { l.endpoints.push_back(l.endpoints[1]); }), Counts(1, 1));
}

// A few small params that the source replicates do not count.
TEST(Copies, SmallReplicatedParams) {
  Layout layout = job(kSharded, side({{"tp", 2, 1}, {"dp", 3, 2}}, {0}, 4));
  Endpoint &source = layout.endpoints[0];
  source.shardings.push_back({{}, {{{0, 0, 1, 1, 0, 0}}}, 1});
  Param bias;
  bias.shape = {{{}, {1}}};
  bias.parts = {{1, {{1, 0}}}};
  source.params.push_back(bias);
  EXPECT_EQ(counts(layout), Counts(1, 1)) << "a thirteenth";
  source.params[0].shape[0].at[0] = 64;
  EXPECT_EQ(counts(layout), Counts(1, 3));
}

TEST(Copies, MeshRanks) {
  const EndpointCopies copies({{2, 3}, {12, 2}}); // of 24 mesh ranks: 2 x [3] x 2 x [2]
  EXPECT_EQ(copies.count(), 6);
  std::vector<std::vector<int32_t>> ofCopy(6);
  for (int32_t meshRank = 0; meshRank < 24; ++meshRank) {
    EXPECT_EQ(copies.meshRank(copies.first(meshRank), copies.copy(meshRank)), meshRank);
    ofCopy[copies.copy(meshRank)].push_back(meshRank);
  }
  EXPECT_EQ(ofCopy[0], (std::vector<int32_t>{0, 1, 6, 7}));
  EXPECT_EQ(ofCopy[1], (std::vector<int32_t>{2, 3, 8, 9}));
  EXPECT_EQ(ofCopy[3], (std::vector<int32_t>{12, 13, 18, 19}));
  for (int32_t first : ofCopy[0])
    EXPECT_EQ(copies.first(first), first);
}
