// SPDX-License-Identifier: Apache-2.0
// Staged bytes are summed without overflow: a manifest with impossible sizes is refused.

#include "report/inspect/quantized_forms.h"

#include "tests/verify/support.h"

#include <gmock/gmock.h>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::report;
namespace fbs = reshard::schema;

namespace {

/// The result of peakStagedBytes if the target's `amax` view has `slots` entries of 4 bytes in each of 64 instances.
Result<uint64_t> stagedBytes(int64_t slots) {
  UnpackedPlan parts = compiledParts(
      "{version: 1, model: {dtype: bf16, index: {x: 64}, tensors: {'t.{x}': {shape: [32, 32], shard: {0: tp}}}}, "
      "source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: [2], quantize: nvfp4}}");
  for (auto &param : parts.manifest->endpoints[1]->params)
    if (param->view && param->view->kind == fbs::ViewKind::amax)
      for (auto &extent : param->shape)
        extent->at = {slots};
  const TemporaryFolder folder;
  pack(parts, folder / "altered.rplan");
  std::unique_ptr<Plan> plan;
  Status status = Plan::open(folder / "altered.rplan", plan);
  return status.ok() ? peakStagedBytes(*plan) : status;
}

TEST(QuantizedForms, SumsDoNotOverflow) {
  for (const uint64_t slots : {2, 1024}) {
    const Result<uint64_t> bytes = stagedBytes(static_cast<int64_t>(slots));
    ASSERT_EQ(bytes.status().message(), "");
    EXPECT_EQ(*bytes, 64u * std::max<uint64_t>(64, 4 * slots));
  }
  for (const int64_t slots : {int64_t{1} << 56, int64_t{1} << 57, int64_t{1} << 58})
    EXPECT_THAT(
        stagedBytes(slots).status().message(),
        testing::HasSubstr(
            "of endpoint 'target' and the params before it stage more than 1152921504606846976 bytes on one rank"))
        << slots;
}

} // namespace
