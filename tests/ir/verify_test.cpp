// SPDX-License-Identifier: Apache-2.0
// verify() finds each violation that is put into correct IR.

#include "ir/text.h"

#include "compiler/compile.h"

#include <gtest/gtest.h>

#include <functional>

using namespace reshard;
using namespace reshard::ir;

namespace {

Module good(const char *lesson, const CompileOptions &options = {}) {
  CompileResult result;
  Diagnostics diagnostics;
  EXPECT_TRUE(
      compileJob(std::string(RESHARD_SOURCE_DIR "/tests/compiler/lessons/") + lesson, options, result, diagnostics))
      << diagnostics.text();
  EXPECT_EQ(toString(verify(result.module)), "");
  return result.module;
}

std::string broken(const char *lesson, const std::function<void(Module &)> &change) {
  Module module = good(lesson);
  change(module);
  return toString(verify(module));
}

} // namespace

TEST(Verify, Layout) {
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints.pop_back(); }),
            "found 1 endpoints, expected a source and at least one target");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[1].ranks[0] = 9; }),
            "target has rank 9, which is outside the world of 5 ranks");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].shardings[0].at.pop_back(); }),
            "source has a sharding with 1 index maps, expected one for each of 2 coordinates");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].shardings[0].at[0][0].to = 1; }),
            "source param 'w' holds position 6 of a dimension of length 6");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].params[0].parts[0].pattern = 7; }),
            "source param 'w' holds tensor 7, expected fewer than 1");
}

TEST(Verify, Pool) {
  EXPECT_EQ(broken("pool.yaml", [](Module &m) { m.layout.endpoints[1].replicas = -1; }),
            "target has -1 engine replicas, expected a positive number in the only target, with source and target on "
            "ranks");
  EXPECT_EQ(broken("pool.yaml", [](Module &m) { m.layout.endpoints[0].replicas = 1; }),
            "source has 1 engine replicas, expected a positive number in the only target, with source and target on "
            "ranks");
  EXPECT_EQ(
      broken("pool.yaml", [](Module &m) { std::swap(m.layout.endpoints[1].ranks[0], m.layout.endpoints[1].ranks[1]); }),
      "target has engine replicas and rank 3, expected the last ranks of the world, in order, above those of the "
      "source");
  CompileOptions alone;
  alone.overrides = {"target={mesh: {dp: 2}, ranks: 2..3}"};
  Module relayed = good("pool.yaml", alone);
  relayed.layout.endpoints[1].replicas = 1;
  EXPECT_EQ(toString(verify(relayed)),
            "rank 1 step 0 receives, expected none on a rank below those of the engine replicas, which pull");
}

TEST(Verify, Transfers) {
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.overlaps[0].bytes = 60; }),
            "overlap 0 has 1 x 60 bytes, but its relations give 1 x 64 bytes");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.transfers.pop_back(); }),
            "target mesh rank 2 holds 64 bytes, but the transfers give it 0");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.overlaps[0].targets = {0, 9}; }),
            "overlap 0 refers to mesh ranks 0 to 9 of target, which has 3");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.overlaps[0].replicaGroups[0].meshRanks = {0, 7}; }),
            "overlap 0 refers to mesh ranks 0 to 7 of source, which has 2");
  EXPECT_EQ(broken("pool.yaml", [](Module &m) { m.layout.endpoints[1].ranks = {3}; }),
            "overlap 0 refers to mesh ranks 0 to 1 of target, which has 1");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.transfers[0].target = 9; }),
            "transfer of overlap 0 to mesh rank 9 arrives at mesh rank 9, which does not need it");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.transfers[0].source = 1; }),
            "transfer of overlap 0 to mesh rank 0 comes from mesh rank 1, which does not hold it");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.descriptors.push_back(m.transfers.descriptors[0]); }),
            "target mesh rank 0 holds 64 bytes, but the descriptors give it 128");
}

TEST(Verify, Schedule) {
  EXPECT_EQ(
      broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].peer = 2; }),
      "message 0 has a send and a receive that disagree in peer, round, level, bytes, chunk or number of operands");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].bytes = 4; }),
            "rank 0 step 0 has 4 bytes, but its operands have 32");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].inputs[0].offset = 800; }),
            "rank 0 step 0 has an operand outside its buffers: bytes 800:832 of 96, buffers 1 to 1 of 1 to 1");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].round = 5; }),
            "rank 0 step 0 is in round 5, expected 0 to 1");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps.pop_back(); }),
            "the schedule has 4 messages, but 3 sends and 4 receives");
  EXPECT_EQ(broken("columns.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].staging = 512; }),
            "rank 0 step 0 uses staging 512 + 24 bytes, outside the arena of 256");
  EXPECT_EQ(broken("staging_rounds.yaml", [](Module &m) { m.layout.stagingLimit = 1000; }),
            "rank 0 has an arena of 2048 bytes, the staging limit is 1000");
  EXPECT_EQ(broken("staging_rounds.yaml", [](Module &m) { m.schedule.ranks[2].steps[1].after.clear(); }),
            "rank 2 step 1 reuses bytes of the arena after step 0, but does not wait for it");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].level = 1; }),
            "message 0 has a send and a receive that disagree in peer, round, level, bytes, chunk or number of "
            "operands");
  EXPECT_EQ(broken("quantized_in_two_phases.yaml", [](Module &m) { m.schedule.ranks[2].steps[2].level = 0; }),
            "rank 2 step 2 has dependency level 0, expected more than the 0 of step 0, for which it waits");
  EXPECT_EQ(broken("columns.yaml", [](Module &m) { m.schedule.ranks[2].buffers[0].bytes = 1; }),
            "rank 2 has buffers that differ from those of its layouts");
}
