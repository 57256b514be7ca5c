// SPDX-License-Identifier: Apache-2.0
// Plans with valid digests and numbers that require too much memory or time: the tools run a correct plan, and reject
// any other quickly with an error message.

#include "command/common.h"
#include "tests/verify/support.h"
#include "tools/run/execution.h"
#include "verify/check/synthesize.h"
#include "verify/proof/plan_verifier.h"

#include <gmock/gmock.h>

#include <functional>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::command;
using namespace reshard::tools;
namespace fbs = reshard::schema;
using testing::HasSubstr;

namespace {

class HostilePlans : public testing::Test {
protected:
  UnpackedPlan read(const std::string &yaml) {
    compile(yaml, path_);
    return unpack(path_);
  }

  /// The exit code and the stderr of `reshard-exec --synthesize --check`.
  std::pair<int, std::string> run(const UnpackedPlan &parts, double timeout) {
    pack(parts, path_);
    ExecutionOptions options;
    options.plan = path_;
    options.synthesize = options.check = true;
    options.threads = 3;
    options.timeout = timeout;
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    const int code = execute(options);
    said_ = testing::internal::GetCapturedStdout();
    return {code, testing::internal::GetCapturedStderr()};
  }

  fbs::TensorPatternT &pattern(const UnpackedPlan &parts, const std::string &name) {
    for (const auto &pattern : parts.manifest->tensor_patterns)
      if (pattern->name == name)
        return *pattern;
    throw std::runtime_error("no tensor '" + name + "'");
  }

  fbs::ParamT &param(const UnpackedPlan &parts, size_t endpoint, const std::string &name) {
    for (const auto &param : parts.manifest->endpoints[endpoint]->params)
      if (param->name == name)
        return *param;
    throw std::runtime_error("no param '" + name + "'");
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_ / "plan";
  std::string said_; // on stdout
};

} // namespace

// Rows of 2^31 - 1 columns, of which the source holds 256: element indices are far apart, and no memory may be used for
// elements that no rank holds.
TEST_F(HostilePlans, SparselyHeldWideTensor) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer keeps records of all addresses";
#endif
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [256, 256]}}, source: {mesh: {}, quantize: block_fp8}, target: {mesh: {tp: 2}, ranks: 1..2}})");
  pattern(parts, "w").shape[1] = INT32_MAX;
  EXPECT_EQ(run(parts, 60), std::pair(kDone, std::string()));
  EXPECT_THAT(said_, HasSubstr("bytes right"));
}

TEST_F(HostilePlans, TensorBeyondTheAddressSpace) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [256, 256]}}, source: {mesh: {}, quantize: block_fp8}, target: {mesh: {tp: 2}, ranks: 1..2}})");
  pattern(parts, "w").shape[1] = uint64_t{1} << 50;
  const auto [code, said] = run(parts, 60);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(said, HasSubstr("cannot assemble a tensor from the source's shards: no address space for"));
}

// The amax of a matrix covers the elements that the source holds, however large the plan declares the matrix.
TEST_F(HostilePlans, SparselyHeldTallMatrix) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: 2..2, quantize: nvfp4}})");
  for (const auto &pattern : parts.manifest->tensor_patterns)
    if (pattern->name == "w")
      pattern->shape[0] = uint64_t{1} << 50;
  EXPECT_EQ(run(parts, 60), std::pair(kDone, std::string()));
  EXPECT_THAT(said_, HasSubstr("bytes right"));
}

TEST_F(HostilePlans, LongWorkHasADeadline) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: {shape: [65536, 2048], shard: {1: tp}}}}, source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: 2..2}})");
  const auto [code, said] = run(parts, 0.02);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(said, HasSubstr("the synthesis did not finish within the deadline of 0.02 s (--timeout)"));
}

// Fields that a quantized view's kind does not use must have their defaults: the executor and the check read them for
// every kind.
TEST_F(HostilePlans, ViewFieldsOfAnotherKind) {
  const std::string yaml =
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1, quantize: HOW}})";
  const auto how = [&](const std::string &text) { return std::string(yaml).replace(yaml.find("HOW"), 3, text); };
  const std::string sender = how("{format: mxfp8, by: sender, scale_layout: swizzled}"), nvfp4 = how("nvfp4"),
                    packed = how("{format: block_fp8_ue8m0, scale_layout: packed}");
  const char *other = "is a view with params, or a layout of scales, that its kind does not use";
  const struct {
    std::string yaml;
    size_t endpoint;
    std::string view;
    std::function<void(fbs::QuantizedViewT &)> alter;
    std::string message;
  } violations[] = {
      {sender, 0, "w (codes of mxfp8)",
       [](fbs::QuantizedViewT &view) { view.scale_layout = fbs::ScaleLayout::swizzled; }, other},
      {sender, 0, "w (scales of mxfp8)",
       [](fbs::QuantizedViewT &view) { view.scale_layout = fbs::ScaleLayout::swizzled; }, other},
      {sender, 0, "w (scales of mxfp8)", [](fbs::QuantizedViewT &view) { view.scales = 1; }, other},
      {sender, 1, "w_scale (plain)", [](fbs::QuantizedViewT &view) { view.scale_layout = fbs::ScaleLayout::plain; },
       other},
      {sender, 1, "w_scale (plain)", [](fbs::QuantizedViewT &view) { view.scales = 0; }, other},
      {how("mxfp8"), 1, "w (elements)", [](fbs::QuantizedViewT &view) { view.tensor_scale = 0; }, other},
      {nvfp4, 0, "w (amax of 'w')", [](fbs::QuantizedViewT &view) { view.tensor_scale = 1; }, other},
      {nvfp4, 1, "w (amax)", [](fbs::QuantizedViewT &view) { view.scale_layout = fbs::ScaleLayout::swizzled; }, other},
      {how("mxfp8"), 1, "w (elements)", [](fbs::QuantizedViewT &view) { view.scale_layout = fbs::ScaleLayout::packed; },
       "has a layout of scales that its format does not have"},
      {packed, 1, "w_scale_inv (plain)", [](fbs::QuantizedViewT &view) { view.format = fbs::Quantization::mxfp4; },
       "has a layout of scales that its format does not have"},
      {how("{format: block_fp8, by: receiver}"), 1, "w (elements)",
       [](fbs::QuantizedViewT &view) { view.staged = false; },
       "has blocks of several rows, but its elements are not staged"},
  };
  for (const auto &violation : violations) {
    const UnpackedPlan parts = read(violation.yaml);
    violation.alter(*param(parts, violation.endpoint, violation.view).view);
    EXPECT_EQ(run(parts, 60).first, kUsage);
    std::unique_ptr<Plan> plan;
    EXPECT_EQ(Plan::open(path_, plan).message(), "'" + path_ + "': the manifest is inconsistent: endpoint '" +
                                                     (violation.endpoint ? "target" : "source") + "' param '" +
                                                     violation.view + "' " + violation.message);
  }
}

// Codes have a row for each row of the matrix or for each block, no other form of equal length.
TEST_F(HostilePlans, CodesInRowsOfAnotherLength) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1, quantize: {format: mxfp4, codes: "{name}_blocks", codes_shape: blocks}}})");
  fbs::ParamT &codes = param(parts, 1, "w_blocks");
  ASSERT_EQ(codes.shape.size(), 3u);
  EXPECT_EQ(codes.shape[1]->at[0], 2);
  EXPECT_EQ(codes.shape[2]->at[0], 16);
  codes.shape[1]->at[0] = 4;
  codes.shape[2]->at[0] = 8;
  pack(parts, path_);
  std::unique_ptr<Plan> plan;
  EXPECT_EQ(Plan::open(path_, plan).message(), "'" + path_ +
                                                   "': the manifest is inconsistent: endpoint 'target' param 'w "
                                                   "(elements)' is a view whose shape does not match its base params");
}

TEST_F(HostilePlans, AmaxNameMustExtendTheTensorName) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1, quantize: nvfp4}})");
  pattern(parts, "w").name = "v";
  pack(parts, path_);
  std::unique_ptr<Plan> plan;
  EXPECT_EQ(Plan::open(path_, plan).message(),
            "'" + path_ +
                "': the manifest is inconsistent: endpoint 'source' param 'w (amax of 'w')' holds the amax tensor 'w " +
                "(amax)', expected a name that begins with 'v', its base tensor");
}

// Both sides of each message are checked before memory is allocated.
TEST_F(HostilePlans, MessageWithoutSender) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1}})");
  parts.manifest->messages = 2;
  const auto [code, said] = run(parts, 60);
  EXPECT_EQ(code, kUsage);
  EXPECT_EQ(said, "reshard-exec: error: message 1 is neither sent nor received\n");
}

TEST_F(HostilePlans, ParamsLargerThanTheMachine) {
  const UnpackedPlan parts = read(
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1}})");
  for (const int endpoint : {0, 1})
    parts.manifest->endpoints[endpoint]->params[0]->shape[0]->at[0] = int64_t{1} << 40;
  for (const auto &segment : parts.segments)
    for (fbs::BufferRange &run : segment->buffers)
      run = fbs::BufferRange(run.endpoint(), run.mesh_rank(), run.param(), run.first(), run.count(), 0,
                             uint64_t{1} << 47);
  const auto [code, said] = run(parts, 60);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(
      said, HasSubstr("cannot allocate the params of source: ranks up to rank 0 need 128.0 TiB, but this machine has"));
}
