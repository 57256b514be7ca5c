// SPDX-License-Identifier: Apache-2.0
// The router: each parcel of a class reaches every wanter once, and the busiest link or NIC is near the optimum.

#include "compiler/transfer/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

using namespace reshard;

namespace {

std::vector<int32_t> range(int32_t first, int32_t end) {
  std::vector<int32_t> ranks(static_cast<size_t>(end - first));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

/// Routes classes, checks that each parcel is a forest from the holders to all wanters, and that `load` is that of the
/// hops.
std::vector<std::vector<RoutedParcel>> routed(const Topology &topology, int64_t world,
                                              const std::vector<ByteClass> &classes, NetworkLoad &load) {
  NetworkLoad expected = load;
  std::vector<std::vector<RoutedParcel>> parcels = route(topology, classes, load);
  EXPECT_EQ(parcels.size(), classes.size());
  for (size_t c = 0; c < classes.size(); ++c) {
    int64_t bytes = 0;
    for (const RoutedParcel &parcel : parcels[c]) {
      bytes += parcel.bytes;
      EXPECT_GT(parcel.bytes, 0);
      std::set<int32_t> have(classes[c].holders.begin(), classes[c].holders.end());
      for (const RankHop &hop : parcel.hops) {
        EXPECT_TRUE(have.count(hop.from));
        EXPECT_TRUE(have.insert(hop.to).second);
        expected.add(hop, parcel.bytes);
      }
      EXPECT_EQ(have.size(), classes[c].holders.size() + classes[c].wanters.size());
      for (const int32_t wanter : classes[c].wanters)
        EXPECT_TRUE(have.count(wanter));
    }
    EXPECT_EQ(bytes, classes[c].bytes);
  }
  for (size_t i = 0; i < load.resources(); ++i)
    EXPECT_EQ(load.bytes(i), expected.bytes(i));
  EXPECT_GE(load.busiest(), leastRouteTime(topology, world, classes));
  return parcels;
}

/// The time of the routes over the least time.
double ratio(const Topology &topology, int64_t world, const std::vector<ByteClass> &classes) {
  NetworkLoad load(topology, world);
  routed(topology, world, classes, load);
  return static_cast<double>(load.busiest()) / static_cast<double>(leastRouteTime(topology, world, classes));
}

constexpr int64_t kGB = 1'000'000'000;

Topology nodes(int64_t ranks, int64_t nics = 0) {
  Topology topology;
  topology.ranksPerNode = ranks;
  topology.nicsPerNode = nics;
  topology.linkRate = 400 * kGB;
  topology.nicRate = 50 * kGB;
  return topology;
}

} // namespace

/// A holder that sends to seven ranks of its node alone takes seven times as long as each of these.
TEST(Router, RanksOfANodeForwardToEachOther) { EXPECT_LT(ratio(nodes(8), 8, {{{0}, range(1, 8), kGB}}), 1.02); }

TEST(Router, ANodeIsEnteredOverAllOfItsNics) {
  EXPECT_LT(ratio(nodes(8), 16, {{range(0, 8), range(8, 16), kGB}}), 1.02);
}

/// Each node forwards to the next.
TEST(Router, NodesForwardToEachOther) { EXPECT_LT(ratio(nodes(8), 48, {{range(0, 8), range(8, 48), kGB}}), 1.15); }

/// Eight ranks send as fast as one, if they share a NIC: of three nodes with a copy each serves a third.
TEST(Router, RanksShareANic) {
  const std::vector<ByteClass> classes = {{{0, 1, 2, 3, 8, 16}, range(24, 48), kGB}};
  EXPECT_LT(ratio(nodes(8, 1), 48, classes), 1.15);
}

/// A rank is busy with other bytes, so the others serve.
TEST(Router, CountsWhatIsSentAnyway) {
  const Topology topology = nodes(4);
  NetworkLoad load(topology, 4);
  load.add({0, 3}, kGB);
  const std::vector<ByteClass> classes = {{{0, 1}, {2}, kGB}};
  const std::vector<std::vector<RoutedParcel>> parcels = routed(topology, 4, classes, load);
  for (const RoutedParcel &parcel : parcels[0])
    EXPECT_EQ(parcel.hops[0], (RankHop{1, 2}));
  EXPECT_EQ(load.busiest(), NetworkLoad::time(kGB, topology.linkRate));
}

/// Prices and times stay within 64 bits.
TEST(Router, ANicMayBeAnyTimesSlowerThanALink) {
  for (const int64_t rate : {int64_t{1}, int64_t{1000}, 100 * kGB * 1000}) {
    Topology topology = nodes(2);
    topology.nicRate = rate;
    const std::vector<ByteClass> classes = {{{0}, range(1, 6), int64_t{1} << 44}};
    NetworkLoad load(topology, 6);
    routed(topology, 6, classes, load);
  }
}

TEST(Router, RandomClasses) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto ranks = static_cast<int64_t>(1 + random() % 8);
    const int64_t nics = random() % 2 || ranks % 2 ? 0 : ranks / 2, world = static_cast<int64_t>(2 + random() % 24);
    std::vector<ByteClass> classes(1 + random() % 6);
    for (ByteClass &each : classes) {
      std::vector<int32_t> all = range(0, static_cast<int32_t>(world));
      std::shuffle(all.begin(), all.end(), random);
      const size_t holders = 1 + random() % (all.size() - 1), wanters = 1 + random() % (all.size() - holders);
      each.holders.assign(all.begin(), all.begin() + static_cast<ptrdiff_t>(holders));
      each.wanters.assign(all.begin() + static_cast<ptrdiff_t>(holders),
                          all.begin() + static_cast<ptrdiff_t>(holders + wanters));
      std::sort(each.holders.begin(), each.holders.end());
      std::sort(each.wanters.begin(), each.wanters.end());
      each.bytes = static_cast<int64_t>(1 + random() % (1u << (4 + random() % 26)));
    }
    const Topology topology = nodes(ranks, nics);
    NetworkLoad load(topology, world), again(topology, world);
    const auto first = routed(topology, world, classes, load), second = route(topology, classes, again);
    for (size_t c = 0; c < classes.size(); ++c) { // the same result, whenever it is computed
      ASSERT_EQ(first[c].size(), second[c].size());
      for (size_t i = 0; i < first[c].size(); ++i)
        EXPECT_EQ(first[c][i].hops, second[c][i].hops);
    }
  }
}
