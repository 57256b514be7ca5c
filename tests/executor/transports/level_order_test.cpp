// SPDX-License-Identifier: Apache-2.0
// Copies within one process run by the dependency levels of the plan.

#include "executor/transports/dependency_levels.h"

#include "executor/memory/chunked_copies.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <map>

using namespace reshard;
using namespace reshard::tests;

namespace {

class DependencyLevelsTest : public testing::Test {
protected:
  void compile(const std::string &job) {
    ASSERT_NO_FATAL_FAILURE(tests::compile(job, folder_ / "plan"));
    plan_ = openPlan(folder_ / "plan");
  }
  /// Replaces the plan by one in which `level` gives the level of each step.
  template <class Level> void relevel(Level level) {
    UnpackedPlan parts = unpack(folder_ / "plan");
    for (auto &segment : parts.segments)
      for (schema::Step &s : segment->steps)
        raw(s).level = level(*segment, s);
    pack(parts, folder_ / "other");
    plan_ = openPlan(folder_ / "other");
  }
  std::string prepare() {
    const Ranks ranks = fillRanks(*plan_, 1);
    return makeThreadsTransport(1)->prepare(*plan_, locals(ranks), {}).message();
  }

  TemporaryFolder folder_;
  std::unique_ptr<Plan> plan_;
};

} // namespace

TEST_F(DependencyLevelsTest, CopiesOfALevelRunInAnyOrder) {
  size_t most = 0;
  for (const std::string &job : relayJobs()) {
    SCOPED_TRACE(job);
    compile(job);
    const Ranks expected = copied(*plan_, 1), ranks = fillRanks(*plan_, 1);
    const std::vector<LocalRank> all = locals(ranks);
    std::map<uint32_t, std::vector<ChunkedCopies>> levels;
    uint32_t last = 0;
    ASSERT_EQ(forEachCopy(*plan_, all,
                          [&](uint32_t level, const LocalRank &from, const schema::Operand *input, const LocalRank &to,
                              const schema::Operand *output) {
                            EXPECT_GE(level, last);
                            last = level;
                            return levels[level].emplace_back().add(from, input, to, *output);
                          })
                  .message(),
              "");
    std::mt19937_64 random(1);
    for (auto &[level, copies] : levels) {
      std::shuffle(copies.begin(), copies.end(), random);
      for (ChunkedCopies &each : copies)
        for (size_t chunk = 0; chunk < each.size(); ++chunk)
          each.run(chunk, false);
    }
    expectSame(expected, ranks);
    most = std::max(most, levels.size());
  }
  EXPECT_GT(most, 2u);
}

TEST_F(DependencyLevelsTest, LevelsMayHaveGaps) {
  compile(kRelayedJobs[1]);
  const Ranks expected = copied(*plan_, 1);
  uint16_t most = 0;
  relevel([&](const schema::SegmentT &, const schema::Step &step) {
    most = std::max(most, step.level());
    return static_cast<uint16_t>(500 * step.level());
  });
  EXPECT_GT(most, 2u);
  expectSame(expected, copied(*plan_, 1));
}

// Each rank's levels alone pass the loader, so only the pairing of sides can refuse them.
TEST_F(DependencyLevelsTest, RefusesSidesOfAMessageWithDifferentLevels) {
  compile(kRelayedJobs[1]);
  relevel([](const schema::SegmentT &segment, const schema::Step &step) {
    return static_cast<uint16_t>(step.level() + segment.rank);
  });
  const std::string error = prepare();
  EXPECT_EQ(error.find("message 0 differs between rank 0 and rank "), 0u) << error;
  EXPECT_NE(error.find(": expected equal peers, rounds, levels and operand counts"), std::string::npos) << error;
}

TEST_F(DependencyLevelsTest, RefusesSidesOfAMessageWithDifferentOperands) {
  compile("version: 1\nmodel: {dtype: bf16, tensors: {a: [4, 8], b: [4, 8]}}\nsource: {mesh: {tp: 1}}\ntarget: {mesh: "
          "{tp: 1}, ranks: 1..1}\n");
  UnpackedPlan parts = unpack(folder_ / "plan");
  schema::Step &s = parts.segments[1]->steps[0];
  ASSERT_EQ(s.kind(), schema::StepKind::recv);
  ASSERT_EQ(s.output_count(), 2u);
  raw(s).bytes /= 2;
  raw(s).outputCount = 1;
  parts.segments[1]->operands.pop_back();
  pack(parts, folder_ / "other");
  plan_ = openPlan(folder_ / "other");
  const std::string error = prepare();
  EXPECT_NE(error.find(": expected equal peers, rounds, levels and operand counts"), std::string::npos) << error;
}

// Without levels a process with all ranks would forward bytes before they have arrived.
TEST_F(DependencyLevelsTest, RefusesPlansWithoutLevels) {
  compile(kRelayedJobs[1]);
  relevel([](const schema::SegmentT &, const schema::Step &) { return uint16_t{0}; });
  std::string errors;
  for (uint32_t rank = 0; rank < plan_->world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    errors += plan_->segment(rank, segment).message();
  }
  EXPECT_NE(errors.find("has dependency level 0, expected more than the 0 of step"), std::string::npos) << errors;
}
