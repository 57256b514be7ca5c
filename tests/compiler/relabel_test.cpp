// SPDX-License-Identifier: Apache-2.0
// Compares relabel with all permutations: none has more local bytes, and a permutation that is already best does not
// change.

#include "compiler/pass.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// The bytes that target mesh ranks find on their own world ranks, summed over overlaps.
int64_t localBytes(const Module &module, const std::vector<int32_t> &ranks) {
  int64_t bytes = 0;
  for (const Overlap &overlap : module.transfers.overlaps)
    for (int32_t meshRank : overlap.targets)
      for (const ReplicaGroup &replicaGroup : overlap.replicaGroups)
        if (std::any_of(replicaGroup.meshRanks.begin(), replicaGroup.meshRanks.end(),
                        [&](int32_t p) { return module.layout.endpoints[0].ranks[p] == ranks[meshRank]; })) {
          bytes += overlap.pattern < 0 ? 0 : overlap.bytes * overlap.tensors;
          break;
        }
  return bytes;
}

TEST(Relabel, IsTheBestPermutation) {
  int moved = 0, stayed = 0;
  for (int seed = 0; seed < 2500; ++seed) {
    Module module = RandomModule(seed).module();
    Endpoint &target = module.layout.endpoints[1];
    if (target.meshRanks() > 6 || module.layout.endpoints[0].storage)
      continue;
    ASSERT_EQ(toString(findOverlaps(module)), "");
    const std::vector<int32_t> before = target.ranks;
    std::vector<int32_t> ranks = before;
    std::sort(ranks.begin(), ranks.end());
    int64_t best = 0;
    do
      best = std::max(best, localBytes(module, ranks));
    while (std::next_permutation(ranks.begin(), ranks.end()));
    ASSERT_EQ(toString(relabel(module)), "");
    EXPECT_EQ(localBytes(module, target.ranks), best) << "seed " << seed;
    EXPECT_EQ(target.relabeled, best - localBytes(module, before));
    std::vector<int32_t> same = target.ranks;
    std::sort(same.begin(), same.end());
    EXPECT_EQ(same, ranks); // next_permutation sorted `ranks` again
    if (target.relabeled == 0) {
      EXPECT_EQ(target.ranks, before) << "seed " << seed;
    }
    ++(target.relabeled > 0 ? moved : stayed);
    const std::vector<int32_t> chosen = target.ranks;
    ASSERT_EQ(toString(relabel(module)), "");
    EXPECT_EQ(target.ranks, chosen);
  }
  EXPECT_GT(moved, 100);
  EXPECT_GT(stayed, 100);
}

} // namespace
