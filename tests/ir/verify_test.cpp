// One violation at a time, put into good IR.

#include "ir/text.h"

#include "compiler/compile.h"

#include <gtest/gtest.h>

#include <functional>

using namespace reshard;
using namespace reshard::ir;

namespace {

Module good(const char *lesson) {
  CompileResult result;
  Diagnostics diagnostics;
  EXPECT_TRUE(compileJob(std::string(RESHARD_SOURCE_DIR "/tests/compiler/lessons/") + lesson, {}, result, diagnostics))
      << diagnostics.text();
  EXPECT_EQ(verify(result.module), "");
  return result.module;
}

std::string broken(const char *lesson, const std::function<void(Module &)> &change) {
  Module module = good(lesson);
  change(module);
  return verify(module);
}

} // namespace

TEST(Verify, Layout) {
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints.pop_back(); }), "fewer than two endpoints");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[1].ranks[0] = 9; }),
            "target has rank 9 outside the world");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].shardings[0].at.pop_back(); }),
            "source has a share with a list too many or missing");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].shardings[0].at[0][0].to = 1; }),
            "source param 'w' holds position 6 of a dimension of 6");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.layout.endpoints[0].params[0].parts[0].pattern = 7; }),
            "source param 'w' holds a tensor that is not there");
}

TEST(Verify, Transfers) {
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.overlaps[0].bytes = 60; }),
            "tile 0 says 1 x 60 bytes, its relations 1 x 64 bytes");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.transfers.pop_back(); }),
            "target place 2 holds 64 bytes, transfers give it 0");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.transfers[0].source = 1; }),
            "transfer of tile 0 to 0 comes from place 1, which does not hold it");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.transfers.descriptors.push_back(m.transfers.descriptors[0]); }),
            "target place 0 holds 64 bytes, descriptors give it 128");
}

TEST(Verify, Schedule) {
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].peer = 2; }),
            "message 0 differs between its two ends");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].bytes = 4; }),
            "rank 0 step 0 says 4 bytes, its operands have 32");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].inputs[0].offset = 800; }),
            "rank 0 step 0 reaches outside its buffer");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].round = 5; }),
            "rank 0 step 0 is out of its round");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].kind = StepKind::convert; }),
            "rank 0 step 0 is of a reserved kind");
  EXPECT_EQ(broken("even_tp.yaml", [](Module &m) { m.schedule.ranks[0].steps.pop_back(); }),
            "there are 4 messages, but 3 sends and 4 receives");
  EXPECT_EQ(broken("columns.yaml", [](Module &m) { m.schedule.ranks[0].steps[0].staging = 512; }),
            "rank 0 step 0 is staged outside the arena");
  EXPECT_EQ(broken("staging_rounds.yaml", [](Module &m) { m.layout.stagingLimit = 1000; }),
            "rank 0 has an arena past the staging limit");
  EXPECT_EQ(broken("staging_rounds.yaml", [](Module &m) { m.schedule.ranks[2].steps[1].after.clear(); }),
            "rank 2 step 1 takes over bytes of the arena from step 0, and does not wait for it");
  EXPECT_EQ(broken("columns.yaml", [](Module &m) { m.schedule.ranks[2].buffers[0].bytes = 1; }),
            "rank 2 has other buffers than its layouts give it");
}
