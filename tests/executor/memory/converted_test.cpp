// SPDX-License-Identifier: Apache-2.0
// Conversions on a CPU device: chunks that split elements and blocks, staged elements, tensor scales; compared with
// transport `threads`.

#include "executor/transports/device_rounds.h"
#include "tests/executor/cpu_device.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <atomic>

using namespace reshard;
using namespace reshard::tests;

namespace {

const std::string kModel =
    "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {odd: {shape: [4099], dtype: u8}, a: [96, 64], "
    "\"r.{l}\": {shape: [96, 96], shard: {0: tp}}, "
    "wide: {shape: [130, 384], shard: {1: tp}, dtype: fp32}, \"c.{l}\": {shape: [64, 384], shard: {1: tp}}}}\n";
const std::string kLayouts[] = {
    "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2, dp: 4}, ranks: 6..13, FORM}\noptions: {staging: 300KiB, topology: "
    "{ranks_per_node: 4}}\n",
    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3, dp: 2}, FORM}\noptions: {staging: 200KiB, topology: "
    "{ranks_per_node: 1}}\n",
    "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2}, ranks: 1..2, FORM}\noptions: {staging: 400KiB}\n",
    "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}, FORM}\n",
    "source: {mesh: {tp: 3}, quantize: nvfp4}\ntarget: {mesh: {tp: 2}, ranks: 3..4, FORM}\noptions: {staging: "
    "300KiB}\n",
    "source: {mesh: {tp: 2}, quantize: {format: mxfp8, scale_layout: swizzled}}\ntarget: {mesh: {tp: 3}, ranks: 1..3, "
    "FORM}\noptions: {staging: 300KiB, topology: {ranks_per_node: 1}}\n",
    "source: {mesh: {tp: 2}, quantize: block_fp8}\ntarget: {mesh: {tp: 1}, FORM}\n",
    "source: {mesh: {tp: 2}, quantize: int4}\ntarget: {mesh: {tp: 3}, ranks: 1..3, FORM}\noptions: {staging: 300KiB}\n",
};
const std::string kForms[] = {
    "dtype: fp32, convert: rne",
    "dtype: fp8_e4m3, convert: rne",
    "quantize: mxfp8",
    "quantize: {format: mxfp8, by: sender, scale_layout: swizzled}",
    "quantize: {format: block_fp8, by: receiver}",
    "quantize: {format: block_fp8, by: sender}",
    "quantize: {format: nvfp4, scale_layout: swizzled}",
    "quantize: {format: block_fp8_ue8m0, scale_layout: packed}",
    "quantize: {format: block_fp8_ue8m0, by: receiver, scale_layout: packed}",
    "quantize: mxfp4",
    "quantize: int4",
};

/// Calls test(plan) for each layout with each form.
template <class Test> void forEachPlan(Test test) {
  for (const std::string &layout : kLayouts)
    for (const std::string &form : kForms) {
      SCOPED_TRACE(layout + form);
      test(*compiledPlan(kModel + std::string(layout).replace(layout.find("FORM"), 4, form)));
    }
}

void expectSame(const BoundRanks &expected, const BoundRanks &found) {
  ASSERT_EQ(expected.size(), found.size());
  for (size_t rank = 0; rank < expected.size(); ++rank)
    EXPECT_TRUE(expected[rank]->memory() == found[rank]->memory()) << "rank " << rank;
}

} // namespace

TEST(Converted, AllRanksOnOneDevice) {
  forEachPlan([](const Plan &plan) {
    const auto threads = makeThreadsTransport(2),
               device = makeRecordedTransport(std::make_unique<CpuDevice>(1), nullptr, {});
    const BoundRanks expected = runAllRanks(plan, 1, *threads);
    expectSame(expected, runAllRanks(plan, 1, *device));
    EXPECT_EQ(threads->bytes(), device->bytes());
  });
}

TEST(Converted, OneRankPerCommunicatorGivesTheSameBytes) {
  std::atomic<size_t> packed{0}, concurrent{0}, reduced{0}, quantized{0}, split{0};
  forEachPlan([&](const Plan &plan) {
    for (const bool self : {false, true}) {
      const auto threads = makeThreadsTransport(2);
      const BoundRanks expected = runAllRanks(plan, 7, *threads);
      BoundRanks ranks(plan.world());
      FakeFabric fabric;
      onThreads(plan.world(), [&](uint32_t rank) {
        ranks[rank] = std::make_unique<BoundRank>(plan, rank, 6);
        auto device = std::make_unique<CpuDevice>(rank);
        const CpuDevice &recorded = *device;
        RecordedOptions options;
        options.selfMessages = self;
        const auto transport = makeRecordedTransport(
            std::move(device), std::make_unique<CpuCommunicator>(fabric, rank, plan.world()), options);
        const Deadline deadline = deadlineIn(60);
        Status status = ranks[rank]->bind(plan, *transport);
        if (status.ok())
          status = transport->prepare(plan, {ranks[rank]->local}, deadline);
        for (uint64_t seed = 6; seed <= 7 && status.ok(); ++seed) { // other values, so that what a run leaves is wrong
          ranks[rank]->fill(seed);
          status = transport->run(deadline);
        }
        EXPECT_EQ(status.message(), "") << "rank " << rank;
        for (size_t o = 0; o < recorded.operations().size(); ++o) {
          const Operation &operation = recorded.operations()[o];
          const auto *batch = std::get_if<P2pBatch>(&operation);
          const auto *tables = batch ? &batch->concurrent : std::get_if<Tables>(&operation);
          if (!tables)
            continue;
          packed += !tables->rest.empty();
          concurrent += batch && !tables->conversions.empty();
          for (const kernels::ConversionEntry &entry : tables->conversions.entries()) {
            reduced += entry.task == kernels::Task::tensorScales && entry.units > 0;
            quantized += entry.task == kernels::Task::blocks && entry.units > 0 && o > 1;
          }
        }
        split += splitBlockCount(ranks[rank]->local, 0) > 0;
      });
      expectSame(expected, ranks);
    }
  });
  // The jobs exercise each of these cases.
  EXPECT_GT(packed, 0u);
  EXPECT_GT(concurrent, 0u);
  EXPECT_GT(reduced, 0u);
  EXPECT_GT(quantized, 0u);
  EXPECT_GT(split, 0u);
}
