// SPDX-License-Identifier: Apache-2.0
// Conversions on a CPU device: chunks that split elements and blocks, staged elements, tensor scales; compared with
// transport `threads`.

#include "executor/memory/view_jobs.h"
#include "executor/transports/device_rounds.h"
#include "executor/transports/transport.h"
#include "schema/manifest.h"
#include "tests/executor/cpu_device.h"
#include "tests/verify/support.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <random>
#include <thread>

using namespace reshard;
using namespace reshard::tests;

namespace {

/// A rank with bound memory; the memory of quantized views is the executor's.
class BoundRank {
public:
  BoundRank(const Plan &plan, uint32_t rank, uint64_t seed) {
    local.rank = rank;
    if (const Status status = plan.segment(rank, local.segment); !status.ok())
      throw std::runtime_error(status.message());
    for (const schema::BufferRange *range : *local.segment->buffers()) {
      std::vector<std::byte *> &table = tables_.emplace_back();
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(range->endpoint());
      for (const schema::ParamInstance &instance :
           schema::instances(plan.manifest(), endpoint, range->param(), range->mesh_rank())) {
        std::vector<std::byte> &memory =
            memory_.emplace_back(static_cast<size_t>(instance.bytes) + 1, std::byte{0xEE}); // one guard byte
        table.push_back(memory.data());
        std::mt19937_64 random(seed * 1000 + range->param() * 10 + instance.instance + 100 * range->mesh_rank());
        if (range->endpoint() == 0)
          std::generate_n(memory.data(), instance.bytes,
                          [&] { return static_cast<std::byte>(random() % 4 ? random() : random() % 3); });
      }
    }
    for (const auto &table : tables_)
      local.memory.push_back(table.data());
  }

  Status bind(const Plan &plan, Transport &transport) { return viewJobs_.bind(plan, local, transport); }
  const std::deque<std::vector<std::byte>> &memory() const { return memory_; }

  LocalRank local;

private:
  std::deque<std::vector<std::byte *>> tables_;
  std::deque<std::vector<std::byte>> memory_;
  ViewJobs viewJobs_;
};

using BoundRanks = std::vector<std::unique_ptr<BoundRank>>;

/// The memory of all ranks after one run of a transport that has all ranks.
BoundRanks runAllRanks(const Plan &plan, uint64_t seed, Transport &transport) {
  BoundRanks ranks;
  std::vector<LocalRank> locals;
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    ranks.push_back(std::make_unique<BoundRank>(plan, rank, seed));
    EXPECT_EQ(ranks.back()->bind(plan, transport).message(), "");
    locals.push_back(ranks.back()->local);
  }
  EXPECT_EQ(transport.prepare(plan, locals, {}).message(), "");
  EXPECT_EQ(transport.run({}).message(), "");
  return ranks;
}

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

std::string jobOf(std::string layout, const std::string &form) {
  return kModel + layout.replace(layout.find("FORM"), 4, form);
}

void expectSame(const BoundRanks &expected, const BoundRanks &found) {
  ASSERT_EQ(expected.size(), found.size());
  for (size_t rank = 0; rank < expected.size(); ++rank)
    EXPECT_TRUE(expected[rank]->memory() == found[rank]->memory()) << "rank " << rank;
}

} // namespace

TEST(Converted, AllRanksOnOneDevice) {
  for (const std::string &layout : kLayouts)
    for (const std::string &form : kForms) {
      SCOPED_TRACE(layout + form);
      TemporaryFolder folder;
      std::unique_ptr<Plan> plan;
      ASSERT_NO_FATAL_FAILURE(compile(jobOf(layout, form), folder / "plan"));
      ASSERT_EQ(Plan::open(folder / "plan", plan).message(), "");
      const auto threads = makeThreadsTransport(2),
                 device = makeRecordedTransport(std::make_unique<CpuDevice>(1), nullptr, {});
      const BoundRanks expected = runAllRanks(*plan, 1, *threads), found = runAllRanks(*plan, 1, *device);
      expectSame(expected, found);
      EXPECT_EQ(threads->bytes(), device->bytes());
    }
}

TEST(Converted, OneRankPerCommunicatorGivesTheSameBytes) {
  std::atomic<size_t> packed{0}, concurrent{0}, reduced{0}, quantized{0}, split{0};
  for (const std::string &layout : kLayouts)
    for (const std::string &form : kForms)
      for (const bool self : {false, true}) {
        SCOPED_TRACE(layout + form);
        TemporaryFolder folder;
        std::unique_ptr<Plan> plan;
        ASSERT_NO_FATAL_FAILURE(compile(jobOf(layout, form), folder / "plan"));
        ASSERT_EQ(Plan::open(folder / "plan", plan).message(), "");
        const auto threads = makeThreadsTransport(2);
        const BoundRanks expected = runAllRanks(*plan, 7, *threads);
        BoundRanks ranks(plan->world());
        FakeFabric fabric;
        std::vector<Status> results(plan->world());
        std::vector<std::thread> running;

        for (uint32_t rank = 0; rank < plan->world(); ++rank)
          running.emplace_back([&, rank] {
            ranks[rank] = std::make_unique<BoundRank>(*plan, rank, 7);
            auto device = std::make_unique<CpuDevice>(rank);
            const CpuDevice &recorded = *device;
            RecordedOptions options;
            options.selfMessages = self;
            const auto transport = makeRecordedTransport(
                std::move(device), std::make_unique<CpuCommunicator>(fabric, rank, plan->world()), options);
            const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            results[rank] = ranks[rank]->bind(*plan, *transport);
            if (results[rank].ok())
              results[rank] = transport->prepare(*plan, {ranks[rank]->local}, deadline);
            for (int run = 0; run < 2 && results[rank].ok(); ++run)
              results[rank] = transport->run(deadline);
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
        for (std::thread &thread : running)
          thread.join();
        for (uint32_t rank = 0; rank < plan->world(); ++rank)
          ASSERT_EQ(results[rank].message(), "") << "rank " << rank;
        expectSame(expected, ranks);
      }
  // The jobs exercise each of these cases.
  EXPECT_GT(packed, 0u);
  EXPECT_GT(concurrent, 0u);
  EXPECT_GT(reduced, 0u);
  EXPECT_GT(quantized, 0u);
  EXPECT_GT(split, 0u);
}
