// SPDX-License-Identifier: Apache-2.0
// Tests all passes together: lowers random layouts to steps, interprets the steps on labeled elements in a random
// order, and compares the label of every target element with the label that the shardings give.

#include "compiler/pass.h"
#include "compiler/schedule/rank_schedules.h"
#include "ir/copies.h"
#include "ir/text.h"
#include "tests/compiler/random_module.h"
#include "tests/compiler/schedule_interpreter.h"
#include "tests/lib/threads.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// The label of each element of an endpoint, computed from the shardings alone.
Memory labels(const Layout &layout, const Endpoint &endpoint) {
  Memory memory(endpoint.meshRanks());
  for (int64_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank)
    for (const Param &param : endpoint.params) {
      const int64_t count = instances(endpoint, param, meshRank);
      const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
      int64_t elements = 1;
      for (int64_t n : shape)
        elements *= n;
      const size_t base = memory[meshRank].size();
      memory[meshRank].resize(base + count, std::vector<int64_t>(elements, -2));
      if (count == 0)
        continue;
      for (const Part &part : param.parts) {
        const TensorPattern &pattern = layout.tensorPatterns[part.pattern];
        // Visits all combinations of positions of all dimensions.
        std::function<void(size_t, int64_t, int64_t, int64_t)> walk = [&](size_t d, int64_t label, int64_t instance,
                                                                          int64_t offset) {
          if (d == pattern.rank()) {
            memory[meshRank][base + instance][offset] = label;
            return;
          }
          const Sharding &sharding = endpoint.shardings[part.dimensions[d].sharding];
          const bool variable = d < pattern.variables.size();
          const int64_t n =
              variable ? layout.variables[pattern.variables[d]].size : pattern.shape[d - pattern.variables.size()];
          for (const auto &[from, to] : expand(sharding.at[coordinate(endpoint, sharding.axes, meshRank)])) {
            int64_t step = 0, stride = 0;
            if (part.dimensions[d].param >= 0) {
              stride = 1;
              for (size_t k = part.dimensions[d].param + 1; k < shape.size(); ++k)
                stride *= shape[k];
            } else {
              step = 1;
              for (size_t v = param.variables.size(); v-- > 0 && param.variables[v] != pattern.variables[d];) {
                const Sharding &inner = endpoint.shardings[param.instances[v]];
                step *= positionCount(inner.at[coordinate(endpoint, inner.axes, meshRank)]);
              }
            }
            walk(d + 1, label * n + from, instance + to * step, offset + to * stride);
          }
        };
        walk(0, part.pattern, 0, 0);
      }
    }
  return memory;
}

/// The memory of all endpoints when every element has arrived.
std::vector<Memory> complete(const Layout &layout) {
  std::vector<Memory> memory;
  for (const Endpoint &endpoint : layout.endpoints)
    memory.push_back(labels(layout, endpoint));
  return memory;
}

/// The same memory with target elements that no step has written.
std::vector<Memory> unwritten(std::vector<Memory> memory) {
  for (size_t e = 1; e < memory.size(); ++e)
    for (auto &meshRank : memory[e])
      for (auto &instance : meshRank)
        std::fill(instance.begin(), instance.end(), ScheduleInterpreter::kUnwritten);
  return memory;
}

/// Runs all passes on a module. Each must leave correct IR, and the interpreted steps every element in its place.
void expectEveryElement(Lowering &lowering, uint64_t seed) {
  Module &module = lowering.module;
  const std::vector<Memory> expected = complete(module.layout);
  std::vector<Memory> found = unwritten(expected);
  for (const PassInfo &pass : passes()) {
    ASSERT_EQ(toString(lower(pass, lowering)), "") << pass.name;
    ASSERT_EQ(toString(verify(module)), "") << pass.name;
  }
  ScheduleInterpreter(module, found, seed).run();
  ASSERT_EQ(found, expected);
}

} // namespace

TEST(Passes, EveryElementArrives) {
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  int withMessages = 0, withRounds = 0, withRelays = 0, withSenderRelays = 0, relayedWithLimit = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lowering lowering{RandomModule(seed).module(), {}};
    Module &module = lowering.module;
    ASSERT_NO_FATAL_FAILURE(expectEveryElement(lowering, seed));
    for (const RankSchedule &rank : module.schedule.ranks) {
      bool relays = false;
      for (const Step &step : rank.steps) {
        withMessages += step.kind == StepKind::send;
        relays = relays || (step.kind == StepKind::send && step.inputs[0].buffer == 0);
      }
      withSenderRelays += relays;
      relayedWithLimit += relays && module.layout.stagingLimit > 0;
      EXPECT_TRUE(module.layout.stagingLimit == 0 || rank.arenaBytes <= module.layout.stagingLimit);
    }
    withRelays += !module.transfers.routes.empty();
    withRounds += module.schedule.rounds > 1;
  }
  EXPECT_GT(withMessages, cases);
  EXPECT_GT(withRounds, cases / 50);
  EXPECT_GT(withRelays, cases / 50);
  EXPECT_GT(withSenderRelays, cases / 50);
  EXPECT_GT(relayedWithLimit, cases / 100);
}

TEST(Passes, EveryElementArrivesInEachTarget) {
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  int withRoutes = 0, withFilesAndRanks = 0, withMegatron = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lowering lowering{RandomModule(seed).severalTargets(), {}};
    const Module &module = lowering.module;
    ASSERT_NO_FATAL_FAILURE(expectEveryElement(lowering, seed));
    const std::vector<Endpoint> &endpoints = module.layout.endpoints;
    const auto files =
        std::count_if(endpoints.begin() + 1, endpoints.end(), [](const Endpoint &e) { return e.storage; });
    withRoutes += !module.transfers.routes.empty();
    withFilesAndRanks += files > 0 && files + 1 < std::ssize(endpoints);
    withMegatron += module.layout.files.megatron;
  }
  EXPECT_GT(withRoutes, cases / 20);
  EXPECT_GT(withFilesAndRanks, cases / 10);
  EXPECT_GT(withMegatron, cases / 10);
}

TEST(Passes, EveryElementArrivesInEachCopy) {
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  int ofTarget = 0, ofSource = 0, ofBoth = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lowering lowering{RandomModule(seed).copies(), {}};
    Module &module = lowering.module;
    const Copies copies(module.layout);
    module.layout.foldsCopies = copies.targets() > 1;
    ofTarget += copies.each() > 1;
    ofSource += copies.sources() > 1;
    ofBoth += copies.each() > 1 && copies.sources() > 1;
    ASSERT_NO_FATAL_FAILURE(expectEveryElement(lowering, seed));
  }
  EXPECT_GT(ofTarget, cases / 50);
  EXPECT_GT(ofSource, cases / 20);
  EXPECT_GT(ofBoth, cases / 100);
}

// Several threads may ask for ranks, in any order and more than once.
TEST(Passes, RanksAreMadeOneByOne) {
  const int cases = std::getenv("RESHARD_FULL") ? 10000 : 2000;
  int oneByOne = 0, all = 0, periods = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lowering lowering{seed % 2 ? RandomModule(seed).copies() : RandomModule(seed).module(), {}};
    Module &module = lowering.module;
    module.layout.foldsCopies = Copies(module.layout).targets() > 1;
    for (const PassInfo &pass : passes())
      ASSERT_EQ(toString(pass.run(lowering)), "") << pass.name;
    RankSchedules &ranks = *lowering.ranks;
    const std::vector<RankSchedule> expected = allOf(ranks);
    if (dynamic_cast<StoredRanks *>(&ranks)) {
      ++all;
      continue;
    }
    ++oneByOne;
    periods += Copies(module.layout).each() > 1;
    std::array<std::vector<RankSchedule>, 2> made; // each by a thread, in its own order
    const size_t world = ranks.size();
    tests::onThreads(made.size(), [&](uint32_t ascending) {
      made[ascending].resize(world);
      RankSchedule memory; // is reused
      for (size_t i = 0; i < world; ++i) {
        const size_t rank = ascending ? i : world - 1 - i;
        made[ascending][rank] = ranks.get(rank, memory);
      }
    });
    for (const std::vector<RankSchedule> &each : made)
      EXPECT_TRUE(each == expected);
  }
  EXPECT_GT(oneByOne, cases / 5);
  EXPECT_GT(all, cases / 5);
  EXPECT_GT(periods, cases / 400);
}
