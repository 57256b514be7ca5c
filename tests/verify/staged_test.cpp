// SPDX-License-Identifier: Apache-2.0
// Bytes that are staged in the arena before they are quantized: plans with a removed wait or a moved operand are
// rejected by the plan verifier or refused by the loader.

#include <gmock/gmock.h>

#include "tests/verify/support.h"

#include <ctime>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

// Each target block has elements of two source ranks; the staging limit lets a rank stage one or two rows of blocks at
// a time.
std::string job(const char *format, const char *staging) {
  return std::string("{version: 1, model: {dtype: bf16, tensors: {a: {shape: [512, 96], shard: {1: tp}}, b: {shape: "
                     "[256, 96], shard: {1: tp}}}}, source: {mesh: {tp: 4}},") +
         "target: {mesh: {tp: 1, dp: 2}, ranks: 3..4, quantize: {format: " + format +
         ", by: receiver}}, options: {staging: " + staging + "}}";
}

class StagedRows : public testing::TestWithParam<const char *> {
protected:
  void SetUp() override { use("64KiB"); }
  void use(const char *staging) { parts_ = compiledParts(job(GetParam(), staging)); }
  std::string error() const { return proofOf(parts_).error; }
  bool fromArena(const fbs::SegmentT &segment, const fbs::Step &step) const {
    return step.kind() == fbs::StepKind::copy && segment.operands[step.first_input()].buffer() == 0;
  }

  UnpackedPlan parts_;
};

TEST_P(StagedRows, AreRight) {
  EXPECT_EQ(error(), "");
  int copies = 0;
  for (const auto &segment : parts_.segments)
    for (const fbs::Step &step : segment->steps)
      copies += fromArena(*segment, step);
  EXPECT_GE(copies, 6); // one for each phase
}

TEST_P(StagedRows, EachWaitMatters) {
  int altered = 0;
  for (auto &segment : parts_.segments)
    for (const fbs::Step &step : segment->steps) {
      const bool staging = step.output_count() > 0 && segment->operands[step.first_output()].buffer() == 0;
      if (!staging && !fromArena(*segment, step) && step.kind() != fbs::StepKind::reduce)
        continue;
      for (uint32_t i = 0; i < step.after_count(); ++i) {
        uint32_t &before = segment->after[step.first_after() + i];
        const uint32_t right = before;
        const fbs::StepKind kind = segment->steps[right].kind();
        if (right == 0 || (kind == fbs::StepKind::recv &&
                           step.kind() == fbs::StepKind::recv)) // waits between receives are about slots
          continue;
        before = 0;
        // The last copy need not wait for the previous copy, since no step relies on that.
        const bool chain = fromArena(*segment, step) && fromArena(*segment, segment->steps[right]);
        const std::string found = error();
        EXPECT_TRUE(chain || !found.empty())
            << "step of kind " << EnumNameStepKind(step.kind()) << " without step " << right;
        before = right;
        ++altered;
      }
    }
  EXPECT_GE(altered, 12);
  EXPECT_EQ(error(), "");
}

TEST_P(StagedRows, EachOffsetMatters) {
  use("256KiB"); // several rows of blocks at a time
  int altered = 0;
  for (auto &segment : parts_.segments)
    for (fbs::Operand &operand : segment->operands) {
      if (operand.buffer() != 0 || operand.offset() < 256)
        continue;
      const fbs::Operand right = operand;
      raw(operand).offset -= 256;
      EXPECT_NE(error(), "") << "operand at " << right.offset();
      operand = right;
      if (++altered == 24)
        return;
    }
  EXPECT_GE(altered, 6);
}

TEST_P(StagedRows, TheLoaderRefusesPartsOfRows) {
  for (auto &segment : parts_.segments)
    for (const fbs::Step &step : segment->steps) {
      if (!fromArena(*segment, step))
        continue;
      fbs::Operand &output = segment->operands[step.first_output()];
      const fbs::Operand right = output;
      raw(output).offset += 2;
      EXPECT_THAT(error(),
                  testing::AnyOf(testing::HasSubstr("whole rows of blocks"), testing::HasSubstr("expected them in")));
      output = right;
      return;
    }
  FAIL() << "nothing is staged";
}

TEST_P(StagedRows, TheLoaderRefusesMessagesInStagedRows) {
  fbs::SegmentT &segment = *parts_.segments[4];
  for (fbs::Step &step : segment.steps)
    if (step.kind() == fbs::StepKind::recv && step.staging() != UINT64_MAX) {
      raw(step).staging = 0;
      EXPECT_THAT(error(), testing::AnyOf(testing::HasSubstr("elements to quantize are staged before"),
                                          testing::HasSubstr("overwrites arena bytes")));
      return;
    }
  FAIL() << "no message is staged";
}

INSTANTIATE_TEST_SUITE_P(Formats, StagedRows, testing::Values("mxfp8", "block_fp8", "nvfp4"),
                         [](const auto &info) { return std::string(info.param); });

// Columns of 32 tensors from 32 ranks, 59 million rows in the arenas, in 8192 moves. Measured in CPU time.
TEST(StagedColumns, AreProvenAsColumns) {
  const std::unique_ptr<Plan> plan = compiledPlan(
      R"({version: 1, model: {dtype: bf16, index: {x: 32}, tensors: {"t.{x}": [7168, 2048]}, layouts: {
      s: {params: {"t.{x}": {holds: "t.{x}", shard: {1: tp}}}}, t: {params: {w: {stack: x, holds: "t.{x}", shard: {2: tp}}}}}},
      source: {layout: s, mesh: {tp: 32}}, target: {layout: t, mesh: {tp: 4, dp: 8}, ranks: 0..31, quantize: {format: block_fp8, by: receiver}}})");
  const std::clock_t begin = std::clock();
  const VerifyResult result = verifyPlan(*plan, [](double) {});
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 1.0);
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.moves, 32u * 32 * 8);
}

// Steps that quantize nvfp4 elements on arrival wait for the tensor scale.
TEST(TensorScales, AreWaitedFor) {
  UnpackedPlan parts =
      compiledParts("{version: 1, model: {dtype: bf16, tensors: {a: {shape: [64, 96], shard: {0: tp}}}}, "
                    "source: {mesh: {tp: 2}}, target: {mesh: {tp: 1}, ranks: 2..2, quantize: nvfp4}}");
  auto error = [&] { return proofOf(parts).error; };
  EXPECT_EQ(error(), "");
  int altered = 0;
  fbs::SegmentT &segment = *parts.segments[2];
  for (const fbs::Step &step : segment.steps)
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      uint32_t &before = segment.after[step.first_after() + i];
      const uint32_t right = before;
      if (right == 0)
        continue;
      before = 0;
      if (segment.steps[right].kind() == fbs::StepKind::reduce) {
        EXPECT_THAT(error(),
                    testing::HasSubstr("with a tensor scale, but does not wait for the step that computes it"));
        ++altered;
      } else if (step.kind() == fbs::StepKind::reduce) {
        EXPECT_THAT(error(), testing::HasSubstr("reduces amax values that step"));
        ++altered;
      }
      before = right;
    }
  EXPECT_GE(altered, 3);
}

} // namespace
