// SPDX-License-Identifier: Apache-2.0
// The message transport over a slow channel: messages are delayed, requests complete in random order, ranks run at
// different speeds. Every run must complete, with the same targets as transport `threads`.

#include "compiler/pass.h"
#include "executor/interfaces/channel.h"
#include "executor/memory/chunks.h"
#include "executor/memory/mappings.h"
#include "executor/transports/bootstrap.h"
#include "executor/transports/local_peers.h"
#include "executor/transports/transport.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

using namespace reshard;
using tests::Mappable;
using tests::RankMemory;

namespace {

/// The messages in flight between all ranks, which are threads of this process.
struct FakeNetwork {
  std::mutex mutex;
  uint64_t sent = 0;       // chunks of the plan's messages
  std::set<uint32_t> lost; // ranks that check() reports
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::deque<std::vector<std::byte>>> messages; // from, to, tag
};

class SlowChannel : public Channel {
public:
  SlowChannel(FakeNetwork &network, uint32_t rank, uint32_t size, uint64_t seed, uint32_t maxTag = 32767)
      : network_(network), rank_(rank), size_(size), maxTag_(maxTag), random_(seed * 1000 + rank) {}

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  uint32_t maxTag() const override { return maxTag_; }
  void reserve(size_t requests) override { requests_.resize(requests); }

  Status connect(uint32_t peer) override {
    connected_.insert(peer);
    return {};
  }
  Status registerMemory(std::byte *data, uint64_t bytes) override {
    for (const auto &[begin, end] : registered_)
      EXPECT_TRUE(data + bytes < begin || end < data) << "ranges overlap or touch";
    registered_.emplace_back(data, data + bytes);
    return {};
  }
  Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    expectPrepared(peer, tag, data, bytes);
    requests_[request] = {true, true, peer, tag, const_cast<std::byte *>(data), bytes, delay()};
    return {};
  }
  Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    expectPrepared(peer, tag, data, bytes);
    requests_[request] = {true, false, peer, tag, data, bytes, delay()};
    order_[{peer, tag}].push_back(request);
    return {};
  }
  Result<bool> test(size_t number) override {
    Request &request = requests_[number];
    if (request.open && request.delay > 0) {
      --request.delay;
    } else if (request.open && request.sends) {
      // The memory is read only now, to detect a sender that changes it before the send is complete.
      std::lock_guard lock(network_.mutex);
      network_.sent += request.tag >= Bootstrap::kTags;
      network_.messages[{rank_, request.peer, request.tag}].emplace_back(request.data, request.data + request.bytes);
      request.open = false;
    } else if (request.open) {
      auto &waiting = order_[{request.peer, request.tag}];
      std::lock_guard lock(network_.mutex);
      auto &arrived = network_.messages[{request.peer, rank_, request.tag}];
      if (waiting.front() == number && !arrived.empty()) {
        if (arrived.front().size() != request.bytes)
          return failed("received a message of " + std::to_string(arrived.front().size()) + " bytes, expected " +
                        std::to_string(request.bytes));
        std::memcpy(request.data, arrived.front().data(), request.bytes);
        arrived.pop_front();
        waiting.pop_front();
        request.open = false;
      }
    }
    return !request.open;
  }
  Status check(uint32_t peer) override {
    std::lock_guard lock(network_.mutex);
    return network_.lost.contains(peer) ? failed("rank " + std::to_string(peer) + " is lost") : Status();
  }
  bool abandon(const Status &) override { return false; }

private:
  struct Request {
    bool open = false, sends = false;
    uint32_t peer = 0, tag = 0;
    std::byte *data = nullptr;
    uint64_t bytes = 0;
    uint64_t delay = 0;
  };
  /// The peers of all messages of a plan are connected, and their memory is registered.
  void expectPrepared(uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) const {
    EXPECT_TRUE(tag < Bootstrap::kTags || connected_.contains(peer)) << "rank " << peer << " is not connected";
    const auto holds = [&](const auto &range) { return range.first <= data && data + bytes <= range.second; };
    if (tag >= Bootstrap::kTags && bytes > 0) {
      EXPECT_TRUE(std::any_of(registered_.begin(), registered_.end(), holds)) << bytes << " bytes are not registered";
    }
  }
  uint64_t delay() { return random_() % 4 == 0 ? random_() % 60 : random_() % 4; }

  FakeNetwork &network_;
  const uint32_t rank_, size_, maxTag_;
  std::mt19937_64 random_;
  std::vector<Request> requests_;
  std::vector<std::pair<const std::byte *, const std::byte *>> registered_; // begin and end
  std::set<uint32_t> connected_;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<size_t>> order_; // receives, by peer and tag
};

TEST(Messages, CompleteCorrectlyOverSlowChannels) {
  int chunked = 0, forwarded = 0;
  for (const std::string &job : tests::relayJobs())
    for (uint64_t seed = 0; seed < 12; ++seed) {
      SCOPED_TRACE(job + "seed " + std::to_string(seed));
      const std::unique_ptr<Plan> plan = tests::compiledPlan(job);
      const bool shortcut = seed % 4 > 0; // without it all uses the channel
      const Mappable mappable = seed % 4 < 2 ? Mappable::nothing : seed % 4 == 2 ? Mappable::all : Mappable::some;
      tests::Ranks sent;
      for (uint32_t rank = 0; rank < plan->world(); ++rank)
        sent.push_back(std::make_unique<RankMemory>(*plan, rank, mappable));
      const uint64_t runs = 1 + seed / 4;
      bool relayed = false;
      uint64_t chunks = 0, inPlace = 0; // of sends; in place, which slots do not hold
      for (const auto &memory : sent)
        for (const schema::Step *step : *memory->local.segment->steps()) {
          chunked += step->chunk() > 0;
          if (step->kind() == schema::StepKind::send) {
            chunks += chunkCount(*step);
            inPlace += step->staging() == UINT64_MAX ? chunkCount(*step) : 0;
          }
          forwarded += step->kind() == schema::StepKind::send && step->after_count() > 0;
          relayed = relayed || (step->kind() == schema::StepKind::send &&
                                memory->local.segment->operands()->Get(step->first_input())->buffer() == 0);
        }
      FakeNetwork network;
      tests::onThreads(plan->world(), [&](uint32_t rank) {
        const std::unique_ptr<Transport> messages =
            makeMessageTransport(std::make_unique<SlowChannel>(network, rank, plan->world(), seed), shortcut);
        Status status = messages->prepare(*plan, {sent[rank]->local}, deadlineIn(60));
        // Every run moves other values, and ranks are delayed at random, to detect reads before the bytes have
        // arrived or after they have changed.
        std::mt19937_64 random(seed * 1000 + rank);
        for (uint64_t run = 0; run < runs && status.ok(); ++run) {
          if (random() % 3 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          sent[rank]->fill(seed * 10 + run);
          status = messages->run(deadlineIn(60));
        }
        EXPECT_EQ(status.message(), "") << "rank " << rank;
        sent[rank]->fill(0); // after the run the caller may write its source again
      });
      for (const auto &memory : sent)
        memory->fill(seed * 10 + runs - 1);
      expectSame(tests::copied(*plan, seed * 10 + runs - 1), sent);
      if (mappable == Mappable::nothing) {
        EXPECT_EQ(network.sent, runs * (shortcut ? inPlace : chunks));
      } else if (mappable == Mappable::all && !relayed) { // the heads of arenas, with relayed bytes, cannot be mapped
        EXPECT_EQ(network.sent, 0u);
      } // with `some` it depends on the ranks
    }
  EXPECT_GT(chunked, 100);
  EXPECT_GT(forwarded, 50);
}

/// Splits the messages of a plan of ranks 0 to 4 into messages of one operand each, in a round of their own: first one
/// from each sender to each receiver, then all others from rank 0 to rank 3, then the rest. Their chunks use in turn
/// one half and the whole of two slots, so a message that uses the whole waits for two others.
void cutMessages(ir::Module &module, std::unique_ptr<RankSchedules> &ranks, uint32_t count) {
  const std::pair<int32_t, int32_t> ends[] = {{0, 2}, {1, 3}, {1, 4}, {0, 3}}; // sender and receiver
  ir::Schedule &schedule = module.schedule;
  schedule.rounds = schedule.messages = 4 * count;
  for (ir::RankSchedule &rank : schedule.ranks) {
    std::vector<ir::Step> steps;
    for (const ir::Step &whole : rank.steps) {
      const bool send = whole.kind == ir::StepKind::send;
      const auto pair = send ? std::pair(rank.rank, whole.peer) : std::pair(whole.peer, rank.rank);
      const auto at = static_cast<uint32_t>(std::find(std::begin(ends), std::end(ends), pair) - std::begin(ends));
      const ir::Operands &operands = send ? whole.inputs : whole.outputs;
      ASSERT_LT(at, 4u);
      ASSERT_EQ(operands.size(), count);
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t number = i == 0 ? at : at == 3 ? 3 + i : 3 * i + count + at;
        ir::Step &step = steps.emplace_back();
        step.kind = whole.kind;
        step.peer = whole.peer;
        step.round = step.message = number;
        (send ? step.inputs : step.outputs) = {operands[i]};
        const ir::OperandShape &shape = rank.shapes[operands[i].shape];
        step.bytes = shape.rowBytes;
        for (const ir::OperandLoop &loop : shape.loops)
          step.bytes *= loop.count;
        step.chunk = i % 2 ? 512 : 256;
      }
    }
    std::sort(steps.begin(), steps.end(), [](const ir::Step &a, const ir::Step &b) { return a.round < b.round; });
    rank.steps = std::move(steps);
  }
  ranks = std::make_unique<StoredRanks>(schedule.ranks);
  ASSERT_EQ(toString(assignStaging(module, ranks)), "");
}

// Of 64 consecutive messages that the receiver copies, each second one waits for two others because of its slots: 2^32
// paths lead through them, from a message over the channel after them to one before. prepare must not follow each path.
TEST(Messages, PrepareIsFastIfSlotsPassThroughManyCopiedMessages) {
  constexpr uint32_t kCount = 64;
  const tests::TemporaryFolder folder;
  std::string job = "version: 1\nmodel:\n  dtype: bf16\n  tensors:\n";
  for (uint32_t i = 0; i < kCount;
       ++i) // each source rank has six columns: targets get 0 to 3; 4 to 5 and 0 to 1; 2 to 5
    job += "    t" + std::to_string(i) + ": {shape: [256, 12], shard: {1: tp}}\n";
  std::ofstream(folder / "job.yaml") << job << "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3}, ranks: 2..4}\n";
  CompileResult result;
  Diagnostics diagnostics;
  ASSERT_TRUE(compileJob(folder / "job.yaml", {}, result, diagnostics)) << diagnostics.text();
  ASSERT_NO_FATAL_FAILURE(cutMessages(result.module, result.ranks, kCount));
  ASSERT_EQ(toString(writePlan(result.module, *result.ranks, statistics(result.module), folder / "plan").takeError()),
            "");
  const std::unique_ptr<Plan> plan = tests::openPlan(folder / "plan");

  // Ranks 1 and 2 neither publish nor map memory: only rank 3 copies, from rank 0; all else uses the channel.
  const auto shortcut = [](uint32_t rank) { return rank != 1 && rank != 2; };
  tests::Ranks sent;
  uint64_t channelChunks = 0;
  int afterTwo = 0;
  for (uint32_t rank = 0; rank < plan->world(); ++rank) {
    sent.push_back(std::make_unique<RankMemory>(*plan, rank, Mappable::all));
    sent[rank]->fill(1);
    for (const schema::Step *step : *sent[rank]->local.segment->steps()) {
      channelChunks +=
          step->kind() == schema::StepKind::send && !(rank == 0 && step->peer() == 3) ? chunkCount(*step) : 0;
      afterTwo += step->after_count() == 2;
    }
  }
  EXPECT_GE(afterTwo, static_cast<int>(kCount)); // half of the sends of rank 0 and half of the receives of rank 3
  FakeNetwork network;
  std::vector<BytesBy> by(plan->world());
  tests::onThreads(plan->world(), [&](uint32_t rank) {
    const std::unique_ptr<Transport> messages =
        makeMessageTransport(std::make_unique<SlowChannel>(network, rank, plan->world(), 1), shortcut(rank));
    const Deadline end = deadlineIn(20);
    Status status = messages->prepare(*plan, {sent[rank]->local}, end);
    EXPECT_FALSE(passed(end)) << "rank " << rank << " took long to prepare";
    if (status.ok())
      status = messages->run(deadlineIn(20));
    EXPECT_EQ(status.message(), "") << "rank " << rank;
    by[rank] = messages->bytesBy();
  });
  expectSame(tests::copied(*plan, 1), sent);
  EXPECT_EQ(network.sent, channelChunks);
  // A column is 512 bytes; rank 3 has two from rank 0 and two from rank 1.
  for (uint32_t rank = 0; rank < plan->world(); ++rank) {
    const uint64_t columns = kCount * 512, shared = rank == 3 ? 2 * columns : 0;
    EXPECT_EQ(by[rank].sharedMemory, shared);
    EXPECT_EQ(by[rank].messages, rank < 2 ? 0 : 4 * columns - shared);
    EXPECT_EQ(by[rank].local + by[rank].messagesInsideHost, 0u); // rank 1 publishes no address, so it is no local peer
  }
}

TEST(Messages, PrepareFailsOnAllRanksIfItFailsOnOne) {
  const std::unique_ptr<Plan> plan =
      tests::compiledPlan("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [66, 32], shard: {0: tp}}}}\n"
                          "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 1}}\n");
  tests::Ranks memory = tests::fillRanks(*plan, 1);
  std::byte *const nothing[] = {nullptr, nullptr};
  memory[2]->local.memory.assign(memory[2]->local.memory.size(), nothing);
  FakeNetwork network;
  Status results[3];
  tests::onThreads(3, [&](uint32_t rank) {
    results[rank] = makeMessageTransport(std::make_unique<SlowChannel>(network, rank, 3, 1), false)
                        ->prepare(*plan, {memory[rank]->local}, {});
    EXPECT_FALSE(results[rank].timedOut());
  });
  EXPECT_EQ(results[0].message(), "prepare failed on rank 2; see that rank's error");
  EXPECT_EQ(results[1].message(), results[0].message());
  EXPECT_EQ(results[2].message(), "rank 2 uses a buffer that was not bound");
}

TEST(Messages, RejectsAChannelWithTooFewTags) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(tests::kRelayJobs[0]);
  const RankMemory memory(*plan, 0, Mappable::nothing);
  const uint32_t messages = static_cast<uint32_t>(plan->manifest().messages());
  ASSERT_GT(messages, 1u);
  FakeNetwork network;
  const auto transport = makeMessageTransport(
      std::make_unique<SlowChannel>(network, 0, plan->world(), 1, Bootstrap::kTags + messages - 2));
  EXPECT_EQ(transport->prepare(*plan, {memory.local}, {}).message(),
            "the plan has " + std::to_string(messages) + " messages, expected at most " + std::to_string(messages - 1) +
                ", the number of tags of the channel");
}

// A process may close the descriptor of its mapped file, and reuse its number, before others have mapped the file.
TEST(Messages, NoPeerMapsAnotherFileThanThePublishedOne) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(tests::kTwoRanks);
  for (const bool replaced : {false, true}) {
    RankMemory memory(*plan, 1, Mappable::all), other(*plan, 0);
    memory.fill(3);
    LocalPeers publisher, reader;
    ASSERT_EQ(publisher.publish(memory.local, 0).message(), "");
    ASSERT_EQ(reader.publish(other.local, 0).message(), "");
    if (replaced) {
      std::vector<int> opened;
      const int number = SharedMappings().find(memory.local.pointer(1), 1, opened).file,
                file = memfd_create("other", MFD_CLOEXEC);
      ASSERT_EQ(ftruncate(file, 1 << 20), 0);
      ASSERT_EQ(dup2(file, number), number);
      close(file);
    }
    const LocalRank *attached = reader.attach(*plan, 1, publisher.address());
    ASSERT_NE(attached, nullptr);
    ASSERT_EQ(attached->pointer(1) == nullptr, replaced);
    if (!replaced) {
      EXPECT_EQ(std::memcmp(attached->pointer(1), memory.local.pointer(1), 64 * 32), 0);
    }
  }
}

/// Columns of 4 MiB, cut over two ranks, to rows: a message of 1 MiB each way.
std::string columnsToRows(const char *options) {
  return std::string("version: 1\nmodel: {dtype: bf16, tensors: {a: [2048, 1024]}, layouts: {c: {params: same, shard: "
                     "{a: {1: tp}}}, r: {params: same, shard: {a: {0: tp}}}}}\nsource: {layout: c, mesh: {tp: 2}}\n"
                     "target: {layout: r, mesh: {tp: 2}, ranks: 2..3}\noptions: ") +
         options + "\n";
}

/// Runs the ranks of a plan, each on a thread, `runs` times; between runs the sources change. All of it must move
/// through slots.
void expectExactThroughSlots(const Plan &plan, uint64_t runs) {
  const tests::Ranks sent = tests::fillRanks(plan, 0);
  FakeNetwork network;
  std::atomic<uint64_t> received{0};
  tests::onThreads(plan.world(), [&](uint32_t rank) {
    const std::unique_ptr<Transport> messages =
        makeMessageTransport(std::make_unique<SlowChannel>(network, rank, plan.world(), rank));
    Status status = messages->prepare(plan, {sent[rank]->local}, deadlineIn(60));
    for (uint64_t run = 0; run < runs && status.ok(); ++run) {
      sent[rank]->fill(run);
      status = messages->run(deadlineIn(60));
    }
    EXPECT_EQ(status.message(), "") << "rank " << rank;
    const BytesBy by = messages->bytesBy();
    EXPECT_EQ(by.messagesInsideHost, by.messages);
    received += by.messages;
  });
  expectSame(tests::copied(plan, runs - 1), sent);
  EXPECT_EQ(received, uint64_t{4} << 20);
  EXPECT_EQ(network.sent, 0u);
}

// A chunk is larger than the part of its slot that is used. It moves in parts, and the sender overwrites those only
// that the receiver has unpacked.
TEST(Messages, ChunksMoveThroughSlotsInParts) {
  for (const char *options : {"{}", "{staging: 3MiB}"}) { // a chunk for each message, and chunks in both slots
    SCOPED_TRACE(options);
    expectExactThroughSlots(*tests::compiledPlan(columnsToRows(options)), 20);
  }
}

TEST(Messages, NoPeerReadsBeyondWhatIsPublished) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(columnsToRows("{}"));
  const RankMemory memory(*plan, 0, Mappable::all), other(*plan, 2);
  std::vector<int> opened;
  const int file = SharedMappings().find(memory.local.pointer(1), 1, opened).file;
  const schema::Step &send = *memory.local.segment->steps()->Get(0);
  ASSERT_EQ(send.kind(), schema::StepKind::send);
  const uint64_t bytes = memory.local.segment->arena_bytes(), last = send.staging() + send.bytes();
  for (const uint64_t missing : {0u, 1u}) {
    LocalPeers publisher, reader;
    ASSERT_EQ(publisher.publish(memory.local, last - missing).message(), "");
    ASSERT_EQ(reader.publish(other.local, 0).message(), "");
    ASSERT_NE(reader.attach(*plan, 0, publisher.address()), nullptr);
    EXPECT_EQ(reader.slots(0, send) == nullptr, missing > 0);
  }
  // The block has fewer bytes than its header states.
  LocalPeers publisher, reader;
  ASSERT_EQ(publisher.publish(memory.local, bytes).message(), "");
  ASSERT_EQ(reader.publish(other.local, 0).message(), "");
  struct stat status;
  ASSERT_EQ(fstat(publisher.address().file, &status), 0);
  ASSERT_EQ(ftruncate(publisher.address().file, status.st_size - 1), 0);
  EXPECT_EQ(reader.attach(*plan, 0, publisher.address()), nullptr);
  // The process has another block than that of the address, for example since its number was used again.
  LocalPeers successor, late;
  ASSERT_EQ(successor.publish(memory.local, bytes).message(), "");
  ASSERT_EQ(late.publish(other.local, 0).message(), "");
  PeerAddress address = successor.address();
  ++address.token;
  EXPECT_EQ(late.attach(*plan, 0, address), nullptr);
  LocalPeers right;
  ASSERT_EQ(right.publish(other.local, 0).message(), "");
  EXPECT_NE(right.attach(*plan, 0, successor.address()), nullptr);
  // The file of a param ends before the param does.
  for (const int64_t missing : {0, 1}) {
    LocalPeers shorter, attaching;
    ASSERT_EQ(shorter.publish(memory.local, bytes).message(), "");
    ASSERT_EQ(attaching.publish(other.local, 0).message(), "");
    ASSERT_EQ(ftruncate(file, (2 << 20) - missing), 0);
    const LocalRank *attached = attaching.attach(*plan, 0, shorter.address());
    ASSERT_NE(attached, nullptr);
    EXPECT_EQ(attached->pointer(1) == nullptr, missing > 0);
  }
}

// Neither a receiver that waits for a lost sender nor a sender whose slots a lost receiver has not read waits forever.
TEST(Messages, ALostPeerEndsTheWaitForSlots) {
  const std::unique_ptr<Plan> plan =
      tests::compiledPlan("version: 1\nmodel: {dtype: bf16, tensors: {a: [64, 32]}, layouts: {c: {params: same, shard: "
                          "{a: {1: tp}}}, r: {params: same}}}\nsource: {layout: c, mesh: {tp: 2}}\n"
                          "target: {layout: r, mesh: {tp: 1}}\n");
  for (const uint32_t lost : {0u, 1u}) {
    tests::Ranks memory = tests::fillRanks(*plan, 1);
    FakeNetwork network;
    std::unique_ptr<Transport> transports[2];
    tests::onThreads(2, [&](uint32_t rank) {
      transports[rank] = makeMessageTransport(std::make_unique<SlowChannel>(network, rank, 2, 1));
      EXPECT_EQ(transports[rank]->prepare(*plan, {memory[rank]->local}, {}).message(), "");
    });
    network.lost.insert(lost);
    const Status status = transports[1 - lost]->run(deadlineIn(60));
    EXPECT_EQ(status.message(), "rank " + std::to_string(lost) + " is lost: message 0 of round 0 " +
                                    (lost == 0 ? "to" : "from") + " rank " + std::to_string(lost) + ", chunk 0 of 1");
    EXPECT_FALSE(status.timedOut());
  }
}

TEST(Messages, APeerThatFailsBeforeAMessageIsPostedIsNamedAlike) {
  class FailedPeer : public SlowChannel {
  public:
    using SlowChannel::SlowChannel;
    Status receive(size_t, uint32_t peer, uint32_t, std::byte *, uint64_t) override {
      return failed("rank " + std::to_string(peer) + " has failed: no memory");
    }
  };
  const std::unique_ptr<Plan> plan = tests::compiledPlan(tests::kTwoRanks);
  RankMemory memory(*plan, 0, Mappable::nothing);
  FakeNetwork network;
  const std::unique_ptr<Transport> messages = makeMessageTransport(std::make_unique<FailedPeer>(network, 0, 2, 1));
  EXPECT_EQ(messages->prepare(*plan, {memory.local}, deadlineIn(60)).message(),
            "rank 1 has failed: no memory: with rank 1 in prepare");
}

TEST(Messages, ATimeoutNamesTheMissingPeer) {
  const std::unique_ptr<Plan> plan = tests::compiledPlan(tests::kTwoRanks);
  RankMemory memory(*plan, 0, Mappable::nothing), other(*plan, 1, Mappable::nothing);
  {
    FakeNetwork network; // rank 1 never joins
    const std::unique_ptr<Transport> messages = makeMessageTransport(std::make_unique<SlowChannel>(network, 0, 2, 1));
    const Status status = messages->prepare(*plan, {memory.local}, deadlineIn(0.05));
    EXPECT_EQ(status.message(), "timed out waiting for rank 1 in prepare");
    EXPECT_TRUE(status.timedOut());
  }
  FakeNetwork network; // rank 1 prepares and does not run
  const std::unique_ptr<Transport> messages = makeMessageTransport(std::make_unique<SlowChannel>(network, 0, 2, 1));
  const std::unique_ptr<Transport> others = makeMessageTransport(std::make_unique<SlowChannel>(network, 1, 2, 1));
  std::thread gone([&] { EXPECT_EQ(others->prepare(*plan, {other.local}, {}).message(), ""); });
  ASSERT_EQ(messages->prepare(*plan, {memory.local}, {}).message(), "");
  gone.join();
  const Status status = messages->run(deadlineIn(0.05));
  EXPECT_EQ(status.message(),
            "timed out: message 0 of round 0 from rank 1, chunk 0 of 1; rank 1 has not begun the run");
  EXPECT_TRUE(status.timedOut());
  EXPECT_EQ(messages->run({}).message(), "an earlier run failed with messages in flight; launch the processes again");
}

} // namespace
