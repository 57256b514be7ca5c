// SPDX-License-Identifier: Apache-2.0
// Dependency levels: least numbers that grow along `after`, with equal numbers on both sides of a message.

#include "compiler/schedule/rank_steps.h"

#include "compiler/pass.h"
#include "schema/step_rules.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

#include <algorithm>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// The least levels, found by raising levels until nothing changes. Steps that wait only for a slot of the arena are
/// listed here, independently of schema/step_rules.h.
std::vector<std::vector<uint32_t>> leastLevels(const Schedule &schedule) {
  std::vector<std::vector<uint32_t>> levels;
  for (const RankSchedule &rank : schedule.ranks)
    levels.emplace_back(rank.steps.size());
  std::vector<uint32_t> messages(schedule.messages);
  for (bool changed = true; changed;) {
    changed = false;
    auto raise = [&](uint32_t &level, uint32_t least) {
      changed = changed || level < least;
      level = std::max(level, least);
    };
    for (size_t rank = 0; rank < levels.size(); ++rank)
      for (size_t s = 0; s < levels[rank].size(); ++s) {
        const Step &step = schedule.ranks[rank].steps[s];
        for (const uint32_t before : step.after) {
          const StepKind earlier = schedule.ranks[rank].steps[before].kind;
          const bool slot = (earlier == StepKind::send && step.kind != StepKind::recv) ||
                            (earlier == StepKind::recv && step.kind == StepKind::recv);
          raise(levels[rank][s], slot ? 0 : levels[rank][before] + 1);
        }
        if (step.kind == StepKind::send || step.kind == StepKind::recv) {
          raise(messages[step.message], levels[rank][s]);
          raise(levels[rank][s], messages[step.message]);
        }
      }
  }
  return levels;
}

Schedule chain(size_t steps) {
  Schedule schedule;
  schedule.ranks.resize(1);
  for (uint32_t s = 0; s < steps; ++s) {
    schedule.ranks[0].steps.emplace_back();
    if (s > 0)
      schedule.ranks[0].steps.back().after = {s - 1};
  }
  return schedule;
}

} // namespace

TEST(DependencyLevels, AreTheLeastThatGrow) {
  uint32_t greatest = 0;
  for (int seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lowering lowering{RandomModule(seed).module(), {}};
    const Module &module = lowering.module;
    for (const PassInfo &pass : passes())
      ASSERT_EQ(toString(lower(pass, lowering)), "") << pass.name;
    const auto expected = leastLevels(module.schedule); // after the pass assign-staging, which adds to `after`
    for (size_t rank = 0; rank < expected.size(); ++rank)
      for (size_t s = 0; s < expected[rank].size(); ++s) {
        ASSERT_EQ(module.schedule.ranks[rank].steps[s].level, expected[rank][s]) << "rank " << rank << " step " << s;
        greatest = std::max(greatest, expected[rank][s]);
      }
  }
  EXPECT_GT(greatest, 2u);
}

TEST(DependencyLevels, AreCounted) {
  Schedule schedule = chain(schema::kMaxLevels);
  EXPECT_EQ(assignDependencyLevels(schedule), schema::kMaxLevels);
  EXPECT_EQ(schedule.ranks[0].steps.back().level, schema::kMaxLevels - 1);
  schedule = chain(schema::kMaxLevels + 1);
  EXPECT_EQ(assignDependencyLevels(schedule), schema::kMaxLevels + 1);
  schedule = {};
  EXPECT_EQ(assignDependencyLevels(schedule), 0u);
}
