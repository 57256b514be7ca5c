// SPDX-License-Identifier: Apache-2.0
// Alters single descriptors of compiled plans (offset, row length or stride, buffer, peer, order) and recomputes the
// digests. A plan that then moves a wrong byte must be refused by the loader or the executor, or fail the check against
// the layouts; and the plan verifier must find it too.

#include "reshard/reshard.h"
#include "tests/verify/support.h"
#include "verify/check/check.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <unistd.h>

using namespace reshard;
using namespace reshard::tools;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

/// Three replicas that receive 24 pieces each: an alteration of one is a small difference between replicas.
std::string replicas() {
  return "{version: 1, model: {dtype: fp32, tensors: {" + tests::tensorsOfRows(12, 2, 2, 4) +
         "}, layouts: {a: {params: same, shard: {'*': {0: fsdp}}}, b: {params: same}}}, source: {layout: a, mesh: "
         "{fsdp: 2}},"
         " target: {layout: b, mesh: {dp: 3}, ranks: 2..4}}";
}

const std::string kJobs[] = {
    R"({version: 1, model: {dtype: bf16, index: {layer: 3}, tensors: {"l.{layer}.up": {shape: [12, 8], shard: {0: tp}}, "l.{layer}.down": {shape: [8, 12], shard: {1: tp}},
        "l.{layer}.norm": [8]}}, source: {mesh: {tp: 2, dp: 2}}, target: {mesh: {tp: 3}, ranks: 2..4}})",
    R"({version: 1, model: {dtype: fp32, index: {expert: 4}, tensors: {"e.{expert}.g": [2, 3], "e.{expert}.u": [2, 3]}, layouts: {
        a: {place: {expert: ep}, params: {"fc{expert.local}": {concat: [g, u]}}}, b: {params: {w13: {stack: expert, concat: [g, u], shard: {1: tp}, pad: {2: 4}}}}}},
        source: {layout: a, mesh: {ep: 2}}, target: {layout: b, mesh: {tp: 2}}, options: {staging: 1KiB}})",
    R"({version: 1, model: {dtype: bf16, index: {layer: 4}, tensors: {"l.{layer}.a": [5, 6], "l.{layer}.b": [7]}, layouts: {
        a: {params: {"f{layer}": {flat: {of: [a, b], align: 4}, pad: {0: fsdp}, shard: {0: fsdp}}}}, b: {place: {layer: {axis: pp, interleave: 2}},
        params: {"c{layer.chunk}.{layer.local}.a": {holds: a, shard: {1: tp}}, "c{layer.chunk}.{layer.local}.b": {holds: b}}}}},
        source: {layout: a, mesh: {fsdp: 3}}, target: {layout: b, mesh: {tp: 2, pp: 2}, ranks: 2..5}})",
    // Column shards to whole tensors, and the reverse: many rows in one loop.
    R"({version: 1, model: {dtype: fp32, index: {x: 4}, tensors: {"t.{x}": [24, 12]}, layouts: {
        a: {place: {x: ep}, params: {"t.{x}": {holds: "t.{x}"}}}, b: {params: {w: {stack: x, holds: "t.{x}", shard: {2: tp}}}}}},
        source: {layout: a, mesh: {ep: 4}}, target: {layout: b, mesh: {tp: 3, dp: 2}, ranks: 2..7}})",
    R"({version: 1, model: {dtype: fp32, index: {x: 4}, tensors: {"t.{x}": [24, 12]}, layouts: {
        a: {place: {x: ep}, params: {"t.{x}": {holds: "t.{x}"}}}, b: {params: {w: {stack: x, holds: "t.{x}", shard: {2: tp}}}}}},
        source: {layout: b, mesh: {tp: 3, dp: 2}}, target: {layout: a, mesh: {ep: 4}, ranks: 2..5}})",
    replicas(),
};

/// Makes one random alteration and returns its description.
std::string alter(tests::UnpackedPlan &parts, std::mt19937_64 &random, int64_t item) {
  while (true) {
    fbs::SegmentT &segment = *parts.segments[random() % parts.segments.size()];
    if (segment.operands.empty())
      continue;
    const std::string at = " on rank " + std::to_string(segment.rank);
    const auto operand = random() % segment.operands.size();
    fbs::Operand &o = segment.operands[operand];
    const int64_t deltas[] = {item, -item, 2 * item, -4 * item, 8 * item};
    const int64_t delta = deltas[random() % 5];
    switch (random() % 7) {
    case 0:
      test::raw(o).offset += static_cast<uint64_t>(delta);
      return "offset of operand " + std::to_string(operand) + at;
    case 1:
      test::raw(o).buffer += static_cast<uint32_t>(delta / item);
      return "buffer of operand " + std::to_string(operand) + at;
    case 2:
      test::raw(o).shape = static_cast<uint32_t>(random() % segment.shapes.size());
      return "shape of operand " + std::to_string(operand) + at;
    case 3: {
      fbs::Shape &shape = segment.shapes[random() % segment.shapes.size()];
      shape = fbs::Shape(static_cast<uint64_t>(static_cast<int64_t>(shape.row_bytes()) + delta), shape.first_loop(),
                         shape.loop_count());
      return "a row's length" + at;
    }
    case 4:
      if (segment.loops.empty())
        continue;
      if (fbs::Loop &loop = segment.loops[random() % segment.loops.size()]; random() % 2)
        loop = fbs::Loop(loop.count(), loop.stride() + delta, loop.buffer_step());
      else
        loop = fbs::Loop(loop.count(), loop.stride(), loop.buffer_step() + delta / item);
      return "a loop's stride" + at;
    case 5: {
      fbs::Step &step = segment.steps[random() % segment.steps.size()];
      if (step.peer() == UINT32_MAX)
        continue;
      test::raw(step).peer = static_cast<uint32_t>(random() % parts.segments.size());
      return "a peer" + at;
    }
    default: { // swap two adjacent operands
      if (operand + 1 >= segment.operands.size())
        continue;
      std::swap(segment.operands[operand], segment.operands[operand + 1]);
      return "order of operands " + std::to_string(operand) + at;
    }
    }
  }
}

struct Memories {
  explicit Memories(const Plan &plan) : source(plan), target(plan) {
    EXPECT_EQ(source.allocate(0).message(), "");
    EXPECT_EQ(target.allocate(1).message(), "");
  }
  Memory source, target;
};

/// Runs a plan on synthesized values. Returns 'refused', or 'right' or 'wrong' from the check; `targets` receives the
/// target bytes.
std::string play(const std::string &path, uint64_t seed, std::vector<std::vector<std::byte>> *targets) {
  std::unique_ptr<Plan> plan;
  if (!Plan::open(path, plan).ok())
    return "refused";
  Memories memory(*plan);
  reshard_executor *executor = nullptr;
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.threads = 1;
  std::string outcome = "refused";
  if (reshard_open(path.c_str(), nullptr, 0, &options, &executor) == RESHARD_OK) {
    for (const Memory *each : {&memory.source, &memory.target})
      for (const MeshRankMemory &rankMemory : each->rankMemories())
        tests::bindAll(executor, *plan, rankMemory);
    for (const MeshRankMemory &rankMemory : memory.source.rankMemories())
      synthesize(*plan, rankMemory, seed, 1);
    if (reshard_prepare(executor) == RESHARD_OK && reshard_run(executor, 0, nullptr) == RESHARD_OK) {
      uint64_t mismatches = 0;
      for (const MeshRankMemory &rankMemory : memory.target.rankMemories()) {
        mismatches += check(*plan, rankMemory, seed, 1).mismatches;
        tests::forEachBound(*plan, rankMemory, [&](const fbs::ParamInstance &instance, const std::byte *at) {
          targets->emplace_back(at, at + instance.bytes);
        });
      }
      outcome = mismatches ? "wrong" : "right";
    }
  }
  reshard_close(executor);
  return outcome;
}

} // namespace

TEST(Mutate, EveryWrongByteIsFound) {
  const int count = 1000;
  const reshard::tests::TemporaryFolder folder;
  std::mt19937_64 random(1);
  int refused = 0, wrong = 0, harmless = 0;
  for (const std::string &job : kJobs) {
    const std::string path = folder / "good.rplan", altered = folder / "altered.rplan";
    ASSERT_NO_FATAL_FAILURE(tests::compile(job, path));
    std::vector<std::vector<std::byte>> expected[2];
    for (uint64_t seed : {0, 1})
      ASSERT_EQ(play(path, seed, &expected[seed]), "right");
    if (job == replicas()) { // one of the two sources, which receive nothing, and two of the three targets
      EXPECT_EQ(tests::proofOf(tests::unpack(path)).replicas, 3u);
    }

    for (int n = 0; n < count / 2; ++n) {
      tests::UnpackedPlan parts = tests::unpack(path);
      const std::string what = alter(parts, random, &job == kJobs ? 2 : 4);
      tests::pack(parts, altered);
      std::vector<std::vector<std::byte>> found[2];
      const std::string outcome[] = {play(altered, 0, &found[0]), play(altered, 1, &found[1])};
      // Compare the bytes themselves. Fresh target memory is zero, so a byte that was not written differs too.
      const bool moved = outcome[0] != "refused", right = moved && found[0] == expected[0] && found[1] == expected[1];
      if (!moved) {
        ++refused;
      } else if (right) {
        ++harmless;
        EXPECT_EQ(outcome[0], "right") << what;
      } else {
        ++wrong;
        EXPECT_TRUE(outcome[0] == "wrong" || outcome[1] == "wrong") << what;
        EXPECT_NE(tests::proofOf(parts).error, "") << what;
      }
    }
  }
  std::printf("%d alterations: %d refused, %d moved a wrong byte and were found, %d changed nothing that counts\n",
              refused + wrong + harmless, refused, wrong, harmless);
  EXPECT_GT(refused, count / 20);
  EXPECT_GT(wrong, count / 20);
}
