// SPDX-License-Identifier: Apache-2.0
// The recorded transport on the CPU device and communicator of cpu_device.h.

#include "executor/transports/device_rounds.h"
#include "executor/transports/transport.h"
#include "tests/executor/cpu_device.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <set>
#include <thread>

using namespace reshard;
using namespace reshard::tests;

namespace {

void spoilTargets(const Ranks &ranks) {
  for (const auto &rank : ranks)
    for (uint32_t r = 0; r < rank->local.memory.size(); ++r)
      if (const schema::BufferRange &range = *rank->local.segment->buffers()->Get(r); range.endpoint() > 0)
        for (uint32_t i = 0; i < range.count(); ++i)
          std::fill_n(rank->local.memory[r][i], range.bytes(), std::byte{0xDD});
}

/// Addresses that a table reads or writes.
std::set<uint64_t> addresses(const kernels::CopyTable &table, bool written) {
  std::set<uint64_t> result;
  for (uint32_t p = 0; p < table.view().entryCount; ++p) {
    const kernels::CopyEntry &entry = table.entries()[p];
    const kernels::TableShape &shape = table.shapes()[entry.shape];
    for (uint64_t unit = entry.first; unit < uint64_t{entry.first} + entry.units; ++unit) {
      uint64_t row = unit / shape.rowUnits,
               at = (written ? entry.target : entry.source) + unit % shape.rowUnits * entry.width;
      for (uint32_t l = shape.loopCount; l-- > 0; row /= table.loops()[shape.firstLoop + l].count) {
        const kernels::TableLoop &loop = table.loops()[shape.firstLoop + l];
        at += row % loop.count * static_cast<uint64_t>(written ? loop.targetStride : loop.sourceStride);
      }
      for (uint32_t byte = 0; byte < entry.width; ++byte)
        result.insert(at + byte);
    }
  }
  return result;
}

/// The number of bytes with a race: between a batch and its concurrent launch, or between reads and writes of that
/// launch.
size_t shared(const P2pBatch &batch) {
  const std::set<uint64_t> reads = addresses(batch.concurrent.copies, false),
                           writes = addresses(batch.concurrent.copies, true);
  auto common = [&](uint64_t at, bool alsoReads) { return writes.contains(at) || (alsoReads && reads.contains(at)); };
  auto count =
      static_cast<size_t>(std::count_if(reads.begin(), reads.end(), [&](uint64_t at) { return common(at, false); }));
  for (const P2pOp &op : batch.ops)
    for (uint64_t byte = 0; byte < op.bytes; ++byte)
      count += common(reinterpret_cast<uint64_t>(op.memory) + byte, !op.send);
  return count;
}

class RecordedTest : public testing::Test {
public:
  void compile(const std::string &job) {
    ASSERT_NO_FATAL_FAILURE(tests::compile(job, folder_ / "plan"));
    plan_ = openPlan(folder_ / "plan");
  }
  TemporaryFolder folder_;
  std::unique_ptr<Plan> plan_;
};

} // namespace

TEST_F(RecordedTest, AllRanksOnOneDevice) {
  for (const std::string &job : kRelayJobs) {
    SCOPED_TRACE(job);
    compile(job);
    uint64_t bytes = 0;
    const Ranks expected = copied(*plan_, 1, &bytes), ranks = fillRanks(*plan_, 1);
    const std::unique_ptr<Transport> recorded = makeRecordedTransport(std::make_unique<CpuDevice>(1), nullptr, {});
    ASSERT_EQ(recorded->prepare(*plan_, locals(ranks), {}).message(), "");
    EXPECT_EQ(recorded->bytes(), bytes);
    for (int run = 0; run < 2; ++run) {
      spoilTargets(ranks);
      ASSERT_EQ(recorded->run(deadlineIn(60)).message(), "");
      expectSame(expected, ranks);
    }
  }
}

TEST_F(RecordedTest, OneRankPerCommunicatorMovesTheSameBytes) {
  size_t batches = 0, overlapped = 0, forwarded = 0;
  std::vector<std::string> jobs = relayJobs();
  jobs.insert(jobs.end(), std::begin(kUnevenJobs), std::end(kUnevenJobs));
  for (const std::string &job : jobs)
    for (uint64_t seed = 0; seed < 4; ++seed) {
      SCOPED_TRACE(job + "seed " + std::to_string(seed));
      compile(job);
      const Ranks expected = copied(*plan_, seed), ranks = fillRanks(*plan_, seed);
      FakeFabric fabric;
      std::atomic<size_t> exchanges{0}, concurrent{0}, messages{0};
      uint64_t received = 0;
      for (const auto &rank : ranks)
        for (const schema::Step *step : *rank->local.segment->steps()) {
          forwarded += step->kind() == schema::StepKind::send && step->after_count() > 0;
          received += step->kind() == schema::StepKind::recv ? step->bytes() : 0;
        }
      onThreads(plan_->world(), [&](uint32_t rank) {
        auto device = std::make_unique<CpuDevice>(seed * 100 + rank);
        const CpuDevice &recorded = *device;
        RecordedOptions options;
        options.selfMessages = seed % 2 == 1;
        const std::unique_ptr<Transport> transport = makeRecordedTransport(
            std::move(device), std::make_unique<CpuCommunicator>(fabric, rank, plan_->world()), options);
        Status status = transport->prepare(*plan_, {ranks[rank]->local}, deadlineIn(60));
        // One run for half of the seeds: in a second run, bytes that are forwarded too early would still be right
        // from the first. Two runs for the others.
        for (uint64_t run = 0; run < 1 + seed / 2 && status.ok(); ++run)
          status = transport->run(deadlineIn(60));
        EXPECT_EQ(status.message(), "") << "rank " << rank;
        const BytesBy by = transport->bytesBy();
        messages += by.messages;
        EXPECT_EQ(by.local + by.messages, transport->bytes());
        for (const Operation &operation : recorded.operations()) {
          const auto *batch = std::get_if<P2pBatch>(&operation);
          exchanges += batch != nullptr;
          concurrent += batch && !batch->concurrent.empty();
          EXPECT_EQ(batch ? shared(*batch) : 0, 0u) << "rank " << rank;
          const auto *table = std::get_if<Tables>(&operation);
          EXPECT_FALSE(table && table->empty()) << "an empty launch";
        }
      });
      batches += exchanges;
      overlapped += concurrent;
      expectSame(expected, ranks);
      EXPECT_EQ(messages, received); // relays included
    }
  EXPECT_GT(batches, 200u);
  EXPECT_GT(overlapped, batches / 3);
  EXPECT_GT(forwarded, 50u);
}

TEST_F(RecordedTest, LaunchesThatShareArenaBytesAreNotConcurrent) {
  compile(tests::detail::kUnevenModel +
          "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2, dp: 2}}\noptions: {topology: {ranks_per_node: 4}}\n");
  const uint64_t slot = 1 << 20;
  for (const uint64_t slots : {1, 2}) { // all rounds in one slot, or consecutive rounds in two
    size_t batches = 0, concurrent = 0;
    for (auto &segment : unpack(folder_ / "plan").segments) {
      for (schema::Step &step : segment->steps)
        if (step.staging() != UINT64_MAX)
          raw(step).staging = step.round() % slots * slot;
      flatbuffers::FlatBufferBuilder builder;
      builder.Finish(schema::Segment::Pack(builder, segment.get()));
      RankMemory memory(*plan_, segment->rank);
      memory.local.segment = {std::shared_ptr<void>(),
                              flatbuffers::GetRoot<schema::Segment>(builder.GetBufferPointer())};
      std::vector<std::byte> arena(2 * slot);
      std::vector<Operation> operations;
      uint64_t bytes = 0;
      ASSERT_EQ(addRounds(memory.local, {arena.data(), nullptr, 0}, operations, bytes).message(), "");
      for (const Operation &operation : operations)
        if (const auto *batch = std::get_if<P2pBatch>(&operation)) {
          EXPECT_EQ(shared(*batch), 0u);
          ++batches;
          concurrent += !batch->concurrent.empty();
        }
    }
    EXPECT_GT(batches, 10u);
    EXPECT_GT(concurrent, 0u);
  }
}

TEST_F(RecordedTest, LargePlansHaveTheirDependenciesInEarlierRounds) {
  for (const char *overrides :
       {"options.topology=" RESHARD_SOURCE_DIR "/examples/topologies/h100x8.yaml", "options.staging=64MiB"}) {
    ASSERT_NO_FATAL_FAILURE(
        compileFile(RESHARD_SOURCE_DIR "/examples/qwen3-30b-a3b-32-to-16.yaml", folder_ / "plan", {overrides}));
    plan_ = openPlan(folder_ / "plan");
    uint64_t moved = 0;
    size_t batches = 0;
    for (uint32_t rank = 0; rank < plan_->world(); ++rank) {
      LocalRank local;
      local.rank = rank;
      ASSERT_EQ(plan_->segment(rank, local.segment).message(), "");
      std::deque<std::vector<std::byte *>> tables; // unmapped addresses
      uint64_t next = uint64_t{1} << 40;
      for (const schema::BufferRange *range : *local.segment->buffers()) {
        auto &table = tables.emplace_back();
        for (uint32_t i = 0; i < range->count(); ++i, next += (range->bytes() + 255) / 256 * 256)
          table.push_back(reinterpret_cast<std::byte *>(next));
        local.memory.push_back(table.data());
      }
      std::vector<Operation> operations;
      ASSERT_EQ(addRounds(local, {reinterpret_cast<std::byte *>(next), nullptr, 0}, operations, moved).message(), "");
      for (const Operation &operation : operations)
        if (const auto *batch = std::get_if<P2pBatch>(&operation)) {
          ++batches;
          EXPECT_LE(batch->ops.size(), 4u) << "more than one in each direction between nodes and inside a node";
        }
    }
    EXPECT_EQ(moved, plan_->manifest().bytes_target());
    EXPECT_GT(batches, 500u);
  }
}

TEST_F(RecordedTest, AWorldOfOneSendsToItselfIfAsked) {
  compile("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [256, 64], shard: {1: tp}}, b: [33]}}\nsource: {mesh: "
          "{tp: 1}}\ntarget: {mesh: {tp: 1}}\n");
  const Ranks expected = copied(*plan_, 3), ranks = fillRanks(*plan_, 3);
  for (const bool self : {false, true}) {
    FakeFabric fabric;
    auto device = std::make_unique<CpuDevice>(1);
    const CpuDevice &recorded = *device;
    RecordedOptions options;
    options.selfMessages = self;
    auto communicator = std::make_unique<CpuCommunicator>(fabric, 0, 1);
    const int &barriers = communicator->barriers;
    const std::unique_ptr<Transport> transport =
        makeRecordedTransport(std::move(device), std::move(communicator), options);
    ASSERT_EQ(transport->prepare(*plan_, {ranks[0]->local}, {}).message(), "");
    EXPECT_EQ(transport->bytes(), 256u * 64 * 2 + 33 * 2);
    ASSERT_EQ(transport->run(deadlineIn(60)).message(), "");
    EXPECT_TRUE(expected[0]->bytes() == ranks[0]->bytes());
    ASSERT_EQ(recorded.operations().size(), self ? 4u : 2u); // the last one is the barrier
    EXPECT_EQ(barriers, 1);
    if (self) {
      EXPECT_EQ(std::get<P2pBatch>(recorded.operations()[1]).ops.size(), 2u);
    }
  }
}

TEST_F(RecordedTest, SelfMessagesHaveChunks) {
  compile("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [100, 30], shard: {1: tp}}, b: [333]}}\nsource: "
          "{mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}}\n");
  const Ranks expected = copied(*plan_, 3), ranks = fillRanks(*plan_, 3);
  const LocalRank &rank = ranks[0]->local;
  Staging staging;
  staging.selfBytes = selfChunk(rank, 1000);
  ASSERT_EQ(staging.selfBytes, 1024u);
  CpuDevice device(1);
  staging.self = *device.allocate(4 * staging.selfBytes);
  std::vector<Operation> operations;
  uint64_t bytes = 0;
  ASSERT_EQ(addRounds(rank, staging, operations, bytes).message(), "");
  EXPECT_EQ(bytes, 6000u + 666);
  // 6,666 bytes in chunks of 1,024: the first is packed before all batches, the last is unpacked after them.
  EXPECT_EQ(operations.size(), 1u + 7 + 1);
  FakeFabric fabric;
  CpuCommunicator communicator(fabric, 0, 1);
  ASSERT_EQ(device.record(operations, &communicator, {}).message(), "");
  ASSERT_EQ(device.replay().message(), "");
  for (bool done = false; !done;) {
    const Result<bool> polled = device.done();
    ASSERT_EQ(polled.status().message(), "");
    done = *polled;
  }
  EXPECT_TRUE(expected[0]->bytes() == ranks[0]->bytes());
}

TEST_F(RecordedTest, HooksAreCalledOnceAndRecordedLast) {
  compile(kTwoRanks);
  const Ranks ranks = fillRanks(*plan_, 1);
  int calls = 0;
  RecordedOptions options;
  options.refresh = [&] { return ++calls == 1 ? Status() : failed("called again"); };
  auto device = std::make_unique<CpuDevice>(1);
  const CpuDevice &recorded = *device;
  const std::unique_ptr<Transport> transport = makeRecordedTransport(std::move(device), nullptr, options);
  ASSERT_EQ(transport->prepare(*plan_, locals(ranks), {}).message(), "");
  for (int run = 0; run < 3; ++run)
    ASSERT_EQ(transport->run({}).message(), "");
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(std::holds_alternative<Call>(recorded.operations().back()));
  EXPECT_EQ(transport->stream(), &recorded);
  options.refresh = [] { return failed("no memory left"); };
  EXPECT_EQ(makeRecordedTransport(std::make_unique<CpuDevice>(1), nullptr, options)
                ->prepare(*plan_, locals(ranks), {})
                .message(),
            "no memory left");
}

TEST_F(RecordedTest, EnqueueOnTheCallersStream) {
  compile(kTwoRanks);
  const Ranks expected = copied(*plan_, 1), ranks = fillRanks(*plan_, 1);
  auto device = std::make_unique<CpuDevice>(1);
  const CpuDevice &used = *device;
  const std::unique_ptr<Transport> transport = makeRecordedTransport(std::move(device), nullptr, {});
  ASSERT_EQ(transport->prepare(*plan_, locals(ranks), {}).message(), "");
  spoilTargets(ranks);
  int stream = 0;
  ASSERT_EQ(transport->enqueue(&stream).message(), "");
  EXPECT_EQ(used.enqueuedOn, &stream);
  expectSame(expected, ranks);
  EXPECT_EQ(makeThreadsTransport(1)->enqueue(&stream).message(),
            "enqueue needs device 'cuda': device 'cpu' has no streams");
}

TEST_F(RecordedTest, ATimeoutNamesTheMissingPeer) {
  compile(kTwoRanks);
  FakeFabric fabric; // rank 1 prepares and does not run
  const std::string digest = plan_->digest();
  fabric.gathered[1].assign(reinterpret_cast<const std::byte *>(digest.data()),
                            reinterpret_cast<const std::byte *>(digest.data()) + digest.size());
  const Ranks ranks = fillRanks(*plan_, 1);
  const std::unique_ptr<Transport> transport =
      makeRecordedTransport(std::make_unique<CpuDevice>(1), std::make_unique<CpuCommunicator>(fabric, 0, 2), {});
  ASSERT_EQ(transport->prepare(*plan_, {ranks[0]->local}, {}).message(), "");
  const Status status = transport->run(deadlineIn(0.03));
  EXPECT_EQ(status.message(), "timed out: message 0 of round 0 from rank 1, chunk 0 of 1");
  EXPECT_TRUE(status.timedOut());
  EXPECT_EQ(transport->run({}).message(), "an earlier run failed with messages in flight; launch the processes again");
  EXPECT_EQ(transport->enqueue(nullptr).message(),
            "an earlier run failed with messages in flight; launch the processes again");
}

TEST_F(RecordedTest, RejectsOtherPlansRanksAndMemory) {
  compile(kTwoRanks);
  const Ranks ranks = fillRanks(*plan_, 1);
  auto prepare = [&](std::unique_ptr<CpuDevice> device, std::unique_ptr<Communicator> communicator,
                     const std::vector<LocalRank> &which) {
    return makeRecordedTransport(std::move(device), std::move(communicator), {})->prepare(*plan_, which, {});
  };
  FakeFabric fabric;
  fabric.gathered[1].assign(32, std::byte{'x'});
  EXPECT_EQ(prepare(std::make_unique<CpuDevice>(1), std::make_unique<CpuCommunicator>(fabric, 0, 2), {ranks[0]->local})
                .message(),
            "plans differ: rank 1 runs plan " + std::string(32, 'x') + ", rank 0 runs plan " + plan_->digest() +
                "; give the same plan file to all ranks");
  EXPECT_EQ(prepare(std::make_unique<CpuDevice>(1), std::make_unique<CpuCommunicator>(fabric, 0, 3), {ranks[0]->local})
                .message(),
            "the communicator has 3 ranks, expected 2 as the plan");
  EXPECT_EQ(prepare(std::make_unique<CpuDevice>(1), std::make_unique<CpuCommunicator>(fabric, 1, 2), {ranks[0]->local})
                .message(),
            "this process is rank 1 of the communicator, expected it to run exactly that rank");
  EXPECT_EQ(prepare(std::make_unique<CpuDevice>(1), nullptr, {ranks[0]->local}).message(),
            "message 0 of rank 0 needs rank 1, which is not in this process; transport 'threads' needs all ranks of "
            "the plan in one process");
  auto device = std::make_unique<CpuDevice>(1);
  device->unreachable = ranks[1]->local.memory[0][0];
  const auto transport = makeRecordedTransport(std::move(device), nullptr, {});
  EXPECT_EQ(transport->reach(*plan_, ranks[0]->local).message(), "");
  EXPECT_EQ(transport->reach(*plan_, ranks[1]->local).message(),
            "source rank 1 param 'a': found host memory, expected memory of the device");
}

TEST_F(RecordedTest, RejectsPlansWithDependenciesInTheSameRound) {
  compile(kRelayJobs[2]);
  // Moves a send into the round of a step that it waits for, on both ranks: other transports accept this, since they
  // follow `after`.
  UnpackedPlan parts = unpack(folder_ / "plan");
  uint32_t moved = 0, of = 0;
  for (uint32_t rank = 0; rank < parts.segments.size() && moved == 0; ++rank)
    for (const schema::Step &step : parts.segments[rank]->steps)
      if (step.kind() == schema::StepKind::send && step.after_count() > 0 &&
          parts.segments[rank]->steps[parts.segments[rank]->after[step.first_after()]].round() < step.round()) {
        moved = step.message();
        of = parts.segments[rank]->steps[parts.segments[rank]->after[step.first_after()]].round();
        break;
      }
  ASSERT_GT(moved, 0u);
  for (auto &segment : parts.segments)
    for (schema::Step &step : segment->steps)
      if ((step.kind() == schema::StepKind::send || step.kind() == schema::StepKind::recv) && (step.round() > of))
        raw(step).round = of;
  pack(parts, folder_ / "other");
  plan_ = openPlan(folder_ / "other");
  std::string errors;
  for (uint32_t rank = 0; rank < plan_->world(); ++rank) {
    RankMemory memory(*plan_, rank);
    std::vector<std::byte> arena(memory.local.segment->arena_bytes() + 1);
    std::vector<Operation> operations;
    uint64_t bytes = 0;
    errors += addRounds(memory.local, {arena.data(), nullptr, 0}, operations, bytes).message();
  }
  EXPECT_NE(errors.find("expected that step to be in an earlier round"), std::string::npos) << errors;
}
