// SPDX-License-Identifier: Apache-2.0
// DeviceMemory on a simulated device: copies to the device and back, with separate memory for each instance.

#include "tests/executor/cpu_device.h"
#include "tests/verify/support.h"
#include "tools/run/memory.h"
#include "verify/check/check.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::tools;
using namespace reshard::verify;

TEST(DeviceMemory, RoundTrip) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan("version: 1\nmodel: {dtype: bf16, index: {l: 3}, tensors: "
                                                         "{\"a.{l}\": {shape: [64, 7], shard: {0: tp}}, b: [33]}}\n"
                                                         "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 1}}\n");
  Memory host(*plan);
  ASSERT_EQ(host.allocate(0).message(), "");
  tests::CpuDevice device(1);
  DeviceMemory there;
  ASSERT_EQ(there.mirror(*plan, host, device).message(), "");
  ASSERT_EQ(there.rankMemories().size(), 2u);
  for (const MeshRankMemory &rankMemory : host.rankMemories())
    synthesize(*plan, rankMemory, 5, 1);
  ASSERT_EQ(there.toDevice().message(), "");
  for (const MeshRankMemory &rankMemory :
       there.rankMemories()) // the device has exactly the contents that the layouts require
    EXPECT_EQ(check(*plan, rankMemory, 5, 1).mismatches, 0u);
  for (const MeshRankMemory &rankMemory : there.rankMemories())
    synthesize(*plan, rankMemory, 6, 1);
  ASSERT_EQ(there.toHost().message(), "");
  for (const MeshRankMemory &rankMemory : host.rankMemories())
    EXPECT_EQ(check(*plan, rankMemory, 6, 1).mismatches, 0u);
}
