// SPDX-License-Identifier: Apache-2.0
// writePlan: a plan has the content of the schedule and the layouts, and the same module gives the same bytes.

#include "tests/schema/support.h"

#include "schema/limits.h"

#include <gtest/gtest.h>

#include <cstdlib>

using namespace reshard;
using namespace reshard::test;

namespace {

std::string write(const ir::Module &module, const std::string &path, unsigned jobs) {
  return toString(writeModule(module, path, jobs).takeError());
}

/// The segments of the tiny plan, repeated for `copies` groups of four ranks. The loader would refuse this plan.
ir::Module many(size_t copies) {
  ir::Module module = tinyModule();
  const std::vector<ir::RankSchedule> four = module.schedule.ranks;
  for (size_t i = 1; i < copies; ++i)
    for (ir::RankSchedule rank : four) {
      rank.rank = static_cast<int32_t>(module.schedule.ranks.size());
      for (ir::Step &step : rank.steps)
        step.inputs.insert(step.inputs.end(), i % 17,
                           {1, 0, static_cast<int64_t>(i)}); // gives segments of different sizes
      module.schedule.ranks.push_back(std::move(rank));
    }
  module.layout.world = static_cast<int64_t>(module.schedule.ranks.size());
  return module;
}

} // namespace

TEST(Emit, DigestAndSize) {
  const TemporaryFolder folder;
  llvm::Expected<WrittenPlan> written = writeModule(tinyModule(), folder / "plan");
  ASSERT_TRUE(!!written) << toString(written.takeError());
  std::unique_ptr<Plan> plan;
  ASSERT_EQ(Plan::open(folder / "plan", plan).message(), "");
  EXPECT_EQ(plan->digest(), written->digest);
  EXPECT_EQ(plan->container().bytes(), written->bytes);
  EXPECT_EQ(static_cast<int64_t>(std::filesystem::file_size(folder / "plan")), written->bytes);
}

TEST(Emit, SegmentsEqualTheSchedule) {
  const ir::Module module = tinyModule();
  const TemporaryFolder folder;
  writeTiny(folder / "plan");
  const Parts parts = unpack(folder / "plan");
  ASSERT_EQ(parts.segments.size(), module.schedule.ranks.size());
  for (size_t rank = 0; rank < parts.segments.size(); ++rank) {
    const schema::SegmentT &found = parts.segments[rank];
    const ir::RankSchedule &expected = module.schedule.ranks[rank];
    EXPECT_EQ(found.rank, rank);
    EXPECT_EQ(static_cast<int64_t>(found.arena_bytes), expected.arenaBytes);
    EXPECT_EQ(ir::buffers(module.layout)[rank], expected.buffers) << "the module itself";
    ASSERT_EQ(found.buffers.size(), expected.buffers.size());
    for (size_t b = 0; b < found.buffers.size(); ++b) {
      EXPECT_EQ(found.buffers[b].endpoint(), expected.buffers[b].endpoint);
      EXPECT_EQ(static_cast<int32_t>(found.buffers[b].mesh_rank()), expected.buffers[b].meshRank);
      EXPECT_EQ(found.buffers[b].param(), expected.buffers[b].param);
      EXPECT_EQ(found.buffers[b].first(), expected.buffers[b].first);
      EXPECT_EQ(found.buffers[b].count(), expected.buffers[b].count);
      EXPECT_EQ(static_cast<int64_t>(found.buffers[b].bytes()), expected.buffers[b].bytes);
    }
    ASSERT_EQ(found.shapes.size(), expected.shapes.size());
    for (size_t s = 0; s < found.shapes.size(); ++s) {
      EXPECT_EQ(static_cast<int64_t>(found.shapes[s].row_bytes()), expected.shapes[s].rowBytes);
      ASSERT_EQ(found.shapes[s].loop_count(), expected.shapes[s].loops.size());
      for (size_t l = 0; l < expected.shapes[s].loops.size(); ++l) {
        const schema::Loop &loop = found.loops.at(found.shapes[s].first_loop() + l);
        EXPECT_EQ((ir::OperandLoop{static_cast<int64_t>(loop.count()), loop.stride(), loop.buffer_step()}),
                  expected.shapes[s].loops[l]);
      }
    }
    ASSERT_EQ(found.steps.size(), expected.steps.size());
    for (size_t s = 0; s < found.steps.size(); ++s) {
      const schema::Step &step = found.steps[s];
      ir::Step back;
      back.kind = static_cast<ir::StepKind>(step.kind());
      back.round = step.round();
      back.peer = static_cast<int32_t>(step.peer());
      back.message = step.message();
      back.bytes = static_cast<int64_t>(step.bytes());
      back.staging = static_cast<int64_t>(step.staging());
      back.level = step.level();
      auto operand = [&](uint32_t number) {
        const schema::Operand &o = found.operands.at(number);
        return ir::Operand{o.buffer(), o.shape(), static_cast<int64_t>(o.offset())};
      };
      for (uint32_t i = 0; i < step.input_count(); ++i)
        back.inputs.push_back(operand(step.first_input() + i));
      for (uint32_t i = 0; i < step.output_count(); ++i)
        back.outputs.push_back(operand(step.first_output() + i));
      for (uint32_t i = 0; i < step.after_count(); ++i)
        back.after.push_back(found.after.at(step.first_after() + i));
      EXPECT_EQ(back, expected.steps[s]) << "rank " << rank << " step " << s;
    }
  }
}

/// A rank that sends the same bytes to several ranks lists them once; older readers must refuse such a plan.
TEST(Emit, SendsOfTheSameBytesShareOperands) {
  ir::Module module = tinyModule();
  std::vector<ir::Step> &steps = module.schedule.ranks[0].steps;
  const ir::Operands first = {{1, 0, 0}, {1, 0, 6}}, second = {{1, 0, 0}, {1, 0, 0}};
  steps.assign(5, steps[0]);
  module.schedule.ranks[0].arenaBytes = 48;
  for (uint32_t s = 0; s < steps.size(); ++s) {
    steps[s].inputs = s % 2 == 0 ? first : second;
    steps[s].bytes = 48;
    if (s > 0)
      steps[s].after = {s - 1};
  }
  const TemporaryFolder folder;
  auto features = [&] { return readFile(folder / "plan").at(16); };
  writeTiny(folder / "plan");
  EXPECT_EQ(features() & schema::kFeatureSharedOperands, 0u);
  ASSERT_EQ(toString(writeModule(module, folder / "plan").takeError()), "");
  EXPECT_EQ(features() & schema::kFeatureSharedOperands, schema::kFeatureSharedOperands);
  const schema::SegmentT found = std::move(unpack(folder / "plan").segments[0]);
  EXPECT_EQ(found.operands.size(), first.size() + second.size());
  for (size_t s = 0; s < steps.size(); ++s) {
    EXPECT_EQ(found.steps.at(s).first_input(), s % 2 * first.size());
    EXPECT_EQ(found.steps.at(s).input_count(), first.size());
    EXPECT_EQ(found.operands.at(found.steps[s].first_input() + 1).offset(), s % 2 == 0 ? 6u : 0u);
  }
}

TEST(Emit, ManifestEqualsTheLayout) {
  const ir::Module module = tinyModule();
  const schema::ManifestT found = std::move(tinyParts().manifest);
  EXPECT_EQ(found.compiler, kCompilerVersion);
  EXPECT_EQ(found.fingerprint, module.fingerprint);
  EXPECT_EQ(found.model, "tiny");
  EXPECT_EQ(found.world, 4u);
  EXPECT_EQ(found.staging_limit, 64u);
  EXPECT_EQ(found.rounds, 2u);
  EXPECT_EQ(found.messages, 3u);
  ASSERT_EQ(found.variables.size(), 1u);
  EXPECT_EQ(found.variables[0]->name, "layer");
  EXPECT_EQ(found.variables[0]->size, 2u);
  ASSERT_EQ(found.tensor_patterns.size(), 1u);
  EXPECT_EQ(found.tensor_patterns[0]->name, "w{layer}");
  EXPECT_EQ(found.tensor_patterns[0]->shape, (std::vector<uint64_t>{4, 6}));
  EXPECT_EQ(found.tensor_patterns[0]->dtype, schema::DType::bf16);
  ASSERT_EQ(found.endpoints.size(), 2u);
  const schema::EndpointT &target = *found.endpoints[1];
  EXPECT_EQ(target.role, "target");
  EXPECT_EQ(target.layout, "columns");
  EXPECT_EQ(target.ranks, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(target.axes[0]->name, "tp");
  ASSERT_EQ(target.shardings.size(), 4u);
  EXPECT_EQ(target.shardings[2]->axes, (std::vector<uint32_t>{0}));
  EXPECT_EQ(target.shardings[2]->first, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(target.shardings[2]->blocks[1].from(), 3);
  EXPECT_EQ(target.shardings[2]->blocks[1].length(), 3);
  ASSERT_EQ(target.params.size(), 1u);
  EXPECT_EQ(target.params[0]->name, "w.{layer}");
  EXPECT_EQ(target.params[0]->origin, "tiny.yaml:9");
  ASSERT_EQ(target.params[0]->parts.size(), 2u);
  EXPECT_EQ(target.params[0]->parts[1]->pattern, -1);
  EXPECT_EQ(target.params[0]->parts[1]->dimensions[2].sharding(), 3u);
  EXPECT_EQ(target.params[0]->parts[1]->dimensions[2].param(), 1);
  EXPECT_EQ(target.params[0]->parts[1]->dimensions[0].param(), -1);
}

TEST(Emit, SameBytesForAnyNumberOfThreads) {
  const TemporaryFolder folder;
  const ir::Module module = many(100);
  ASSERT_EQ(write(module, folder / "one", 1), "");
  const std::string one = readFile(folder / "one");
  EXPECT_GT(one.size(), 100'000u);
  for (const unsigned jobs : {0u, 2u, 3u, 16u, 1000u}) {
    ASSERT_EQ(write(module, folder / "other", jobs), "");
    EXPECT_TRUE(readFile(folder / "other") == one) << jobs << " jobs";
  }
  std::string compressed;
  for (const unsigned jobs : {1u, 3u, 16u}) {
    ASSERT_EQ(toString(writeModule(module, folder / "other", jobs, true).takeError()), "");
    EXPECT_LT(readFile(folder / "other").size(), one.size() / 2);
    EXPECT_TRUE(jobs == 1 || readFile(folder / "other") == compressed) << jobs << " jobs";
    compressed = readFile(folder / "other");
  }
}

TEST(Emit, Refusals) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  writeFile(path, "old content");
  ir::Module module = tinyModule();
  module.level = ir::Level::transfer;
  EXPECT_EQ(write(module, path, 1), "a plan is written from IR of level 'schedule', found level 'transfer'");

  module = many(20);
  module.schedule.ranks[42].shapes[0].loops.assign(17, {1, 0, 0});
  for (const unsigned jobs : {1u, 4u})
    EXPECT_EQ(write(module, path, jobs), "rank 42 has an operand shape of 17 loops, expected at most 16");
  module.schedule.ranks[42].shapes[0].loops = {{int64_t{1} << 40, 0, 0}, {int64_t{1} << 40, 0, 1}};
  EXPECT_EQ(write(module, path, 1),
            "rank 42 has operands whose loops visit more than 16777216 buffer ranges, which is the limit");

  module = many(20);
  ir::Step &step = module.schedule.ranks[42].steps[0];
  step.bytes = int64_t{1} << 32;
  step.chunk = 256;
  step.after = {0};
  EXPECT_EQ(write(module, path, 1),
            "the messages of rank 42 have more than 16777216 chunks, which is the limit; raise options.staging");

  EXPECT_EQ(write(tinyModule(), folder / "no/plan", 1),
            "cannot create '" + folder / "no/plan" + "': No such file or directory");
  EXPECT_EQ(readFile(path), "old content");
  EXPECT_EQ(folder.entries(), 1u) << "a temporary file remains";
}

// Both are computed before the segment is built. FlatBuffers fail without an error above 2 GiB. The schedules of these
// tests need 0.3 and 1 GiB of memory.
TEST(Emit, RefusesTooManyOperands) {
  if (!std::getenv("RESHARD_FULL"))
    GTEST_SKIP() << "only with RESHARD_FULL=1";
  const TemporaryFolder folder;
  ir::Module module = tinyModule();
  const ir::Operands operands((1 << 22) + 1);
  for (int i = 0; i < 4; ++i)
    module.schedule.ranks[3].steps.push_back({ir::StepKind::fill, 0, -1, 0, 0, {}, operands, -1, {}});
  EXPECT_EQ(write(module, folder / "plan", 2), "the steps of rank 3 have 16777220 operands, expected at most 16777216");
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(Emit, RefusesASegmentOfAGigabyte) {
  if (!std::getenv("RESHARD_FULL"))
    GTEST_SKIP() << "only with RESHARD_FULL=1";
  const TemporaryFolder folder;
  ir::Module module = tinyModule();
  const llvm::SmallVector<uint32_t, 2> after(1 << 24);
  for (int i = 0; i < 16; ++i)
    module.schedule.ranks[3].steps.push_back({ir::StepKind::fill, 0, -1, 0, 0, {}, {}, -1, after});
  EXPECT_EQ(
      write(module, folder / "plan", 2), // 16 × 2^24 numbers of 4 bytes, 16 steps of 64 bytes, 256 bytes of overhead
      "the segment of rank 3 would have 1073743104 bytes, expected fewer than 1073741824");
  EXPECT_EQ(folder.entries(), 0u);
}
