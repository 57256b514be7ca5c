// SPDX-License-Identifier: Apache-2.0
// The pass reroute: it replaces the routes of jobs that the rules of distribute and balance do not fit, and no others.
// passes_test.cpp runs the routes of random modules.

#include "compiler/pass.h"
#include "compiler/transfer/router.h"
#include "ir/text.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

#include <cstdlib>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// What each link and NIC moves, without relays.
NetworkLoad loadOf(const Module &module) {
  const Layout &layout = module.layout;
  NetworkLoad load(layout.topology, layout.world);
  for (const Transfer &transfer : module.transfers.transfers) {
    const Overlap &overlap = module.transfers.overlaps[transfer.overlap];
    const Endpoint &target = layout.endpoints[overlap.endpoint];
    if (target.storage || transfer.source < 0)
      continue;
    const int64_t size = bytes(module.transfers, transfer);
    const int32_t from = layout.endpoints[0].ranks[transfer.source], to = target.ranks[transfer.target];
    if (from != to)
      load.add({from, to}, size);
    if (transfer.route >= 0)
      for (const Hop &hop : module.transfers.routes[transfer.route])
        load.add({target.ranks[hop.from], target.ranks[hop.to]}, size);
  }
  return load;
}

} // namespace

TEST(Reroute, RandomModules) {
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  int changed = 0, kept = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    Module module = RandomModule(seed).module();
    for (auto *pass : {findOverlaps, convert, distribute, balance})
      ASSERT_EQ(toString(pass(module)), "");
    if (module.layout.endpoints[0].storage)
      continue;
    const Transfers before = module.transfers;
    const int64_t time = loadOf(module).busiest();
    ASSERT_EQ(toString(reroute(module)), "");
    ASSERT_EQ(toString(verify(module)), "");
    if (module.transfers == before) {
      ++kept;
      continue;
    }
    ++changed;
    EXPECT_LE(3 * loadOf(module).busiest(), 2 * time + 2);
  }
  EXPECT_GT(changed, cases / 200);
  EXPECT_GT(kept, cases / 2);
}
