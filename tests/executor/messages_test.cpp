// The message transport over a wire that does its worst: what was sent arrives late, requests are seen done in any order, ranks get on at
// different speeds. Every plan must end, with the same targets as by direct copies.

#include "executor/transport.h"
#include "executor/wire.h"
#include "tests/tools/support.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <unistd.h>

using namespace reshard;

namespace {

/// What is on its way between all ranks of a process.
struct Air {
  std::mutex mutex;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::deque<std::vector<std::byte>>> messages; // from, to, tag
  std::map<uint32_t, std::vector<std::byte>> gathered;
};

class SlowWire : public Wire {
public:
  SlowWire(Air &air, uint32_t rank, uint32_t size, uint64_t seed) : air_(air), rank_(rank), size_(size), random_(seed * 1000 + rank) {}

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  void reserve(size_t requests) override { requests_.resize(requests); }

  std::string send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    requests_[request] = {true, true, peer, tag, const_cast<std::byte *>(data), bytes, delay()};
    return {};
  }
  std::string receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    requests_[request] = {true, false, peer, tag, data, bytes, delay()};
    order_[{peer, tag}].push_back(request);
    return {};
  }
  std::string test(size_t number, bool &done) override {
    Request &request = requests_[number];
    if (request.open && request.delay > 0) {
      --request.delay;
    } else if (request.open && request.sends) {
      // Only now is the memory read: whoever changes it before is found out.
      std::lock_guard lock(air_.mutex);
      air_.messages[{rank_, request.peer, request.tag}].emplace_back(request.data, request.data + request.bytes);
      request.open = false;
    } else if (request.open) {
      auto &waiting = order_[{request.peer, request.tag}];
      std::lock_guard lock(air_.mutex);
      auto &arrived = air_.messages[{request.peer, rank_, request.tag}];
      if (waiting.front() == number && !arrived.empty()) {
        if (arrived.front().size() != request.bytes)
          return "a message of " + std::to_string(arrived.front().size()) + " bytes for one of " + std::to_string(request.bytes);
        std::memcpy(request.data, arrived.front().data(), request.bytes);
        arrived.pop_front();
        waiting.pop_front();
        request.open = false;
      }
    }
    done = !request.open;
    return {};
  }
  std::string gather(const std::byte *mine, size_t bytes, std::byte *all) override {
    {
      std::lock_guard lock(air_.mutex);
      air_.gathered[rank_].assign(mine, mine + bytes);
    }
    while (true) {
      std::lock_guard lock(air_.mutex);
      if (air_.gathered.size() < size_)
        continue;
      for (uint32_t rank = 0; rank < size_; ++rank)
        std::memcpy(all + rank * bytes, air_.gathered[rank].data(), bytes);
      return {};
    }
  }
  void abandon() override {}

private:
  struct Request {
    bool open = false, sends = false;
    uint32_t peer = 0, tag = 0;
    std::byte *data = nullptr;
    uint64_t bytes = 0;
    uint64_t delay = 0;
  };
  uint64_t delay() { return random_() % 4 == 0 ? random_() % 400 : random_() % 4; }

  Air &air_;
  const uint32_t rank_, size_;
  std::mt19937_64 random_;
  std::vector<Request> requests_;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<size_t>> order_; // receives, by peer and tag
};

/// The memory of one rank's buffers.
class RankMemory {
public:
  RankMemory(const Plan &plan, uint32_t rank) {
    local.rank = rank;
    if (const std::string error = plan.segment(rank, local.segment); !error.empty())
      throw std::runtime_error(error);
    for (const schema::BufferRun *run : *local.segment->buffers()) {
      std::vector<std::byte *> &table = tables_.emplace_back();
      for (uint32_t i = 0; i < run->count(); ++i) {
        buffers_.emplace_back(run->bytes() + 1, std::byte{0xEE});
        table.push_back(buffers_.back().data());
      }
    }
    for (const auto &table : tables_)
      local.runs.push_back(table.data());
  }

  LocalRank local;
  std::deque<std::vector<std::byte>> &buffers() { return buffers_; }

private:
  std::deque<std::vector<std::byte>> buffers_; // in the order of the segment's buffers
  std::deque<std::vector<std::byte *>> tables_;
};

TEST(Messages, EndAndAreRightOnTheWorstOfWires) {
  const tests::Folder folder;
  const std::string head = "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {a: [96, 40], \"r.{l}\": {shape: [96, 48], shard: {0: tp}}, "
                           "\"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n";
  const char *jobs[] = {
      "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2}, ranks: 1..2}\noptions: {staging: 4KiB}\n",
      "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4, dp: 2}}\noptions: {staging: 2KiB}\n",
      "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1, dp: 5}, ranks: 1..5}\noptions: {staging: 4KiB, topology: {ranks_per_node: 1}}\n",
      "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2, dp: 3}, ranks: 2..7}\noptions: {staging: 4KiB, topology: {ranks_per_node: 2}}\n",
      "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2, dp: 4}}\noptions: {staging: 8KiB, topology: {ranks_per_node: 4, nics: {per_node: 1, rate: 100Gb/s}}}\n",
  };
  int chunked = 0, passedOn = 0;
  for (const char *job : jobs)
    for (uint64_t seed = 0; seed < 6; ++seed) {
      SCOPED_TRACE(job + std::string("seed ") + std::to_string(seed));
      std::unique_ptr<Plan> plan;
      tests::compile(head + job, folder / "plan");
      ASSERT_EQ(Plan::open(folder / "plan", plan), "");
      // The same sources twice: for direct copies, and for messages. Replicas differ, so that it counts from whom bytes come.
      std::vector<std::unique_ptr<RankMemory>> direct, sent;
      for (auto *all : {&direct, &sent})
        for (uint32_t rank = 0; rank < plan->world(); ++rank) {
          all->push_back(std::make_unique<RankMemory>(*plan, rank));
          size_t buffer = 0;
          for (const schema::BufferRun *run : *all->back()->local.segment->buffers())
            for (uint32_t i = 0; i < run->count(); ++i, ++buffer)
              if (run->endpoint() == 0) {
                std::mt19937_64 random(seed * 100 + run->param() * 10 + i + 1000 * run->place());
                for (std::byte &each : all->back()->buffers()[buffer])
                  each = static_cast<std::byte>(random());
              }
        }
      std::vector<LocalRank> locals;
      for (const auto &memory : direct) {
        locals.push_back(memory->local);
        for (const schema::Step *step : *memory->local.segment->steps()) {
          chunked += step->chunk() > 0;
          passedOn += step->kind() == schema::StepKind::send && step->after_count() > 0;
        }
      }
      const std::unique_ptr<Transport> copies = makeThreadsTransport(1);
      bool timedOut = false;
      ASSERT_EQ(copies->prepare(*plan, locals), "");
      ASSERT_EQ(copies->run({}, timedOut), "");

      Air air;
      std::vector<std::string> errors(plan->world());
      std::vector<std::thread> ranks;
      for (uint32_t rank = 0; rank < plan->world(); ++rank)
        ranks.emplace_back([&, rank] {
          const std::unique_ptr<Transport> messages = makeMessageTransport(std::make_unique<SlowWire>(air, rank, plan->world(), seed));
          errors[rank] = messages->prepare(*plan, {sent[rank]->local});
          // One run, since what a second one passes on too early would be right from the first; or two, which need each other in step.
          for (uint64_t run = 0; run < 1 + seed % 2 && errors[rank].empty(); ++run) {
            bool late = false;
            errors[rank] = messages->run(std::chrono::steady_clock::now() + std::chrono::seconds(60), late);
          }
        });
      for (std::thread &rank : ranks)
        rank.join();
      for (uint32_t rank = 0; rank < plan->world(); ++rank) {
        EXPECT_EQ(errors[rank], "") << "rank " << rank;
        EXPECT_TRUE(direct[rank]->buffers() == sent[rank]->buffers()) << "rank " << rank;
      }
    }
  EXPECT_GT(chunked, 100);
  EXPECT_GT(passedOn, 50);
}

TEST(Messages, APeerThatIsGoneIsNamed) {
  const tests::Folder folder;
  std::unique_ptr<Plan> plan;
  tests::compile("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [64, 32], shard: {0: tp}}}}\nsource: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 1}}\n", folder / "plan");
  ASSERT_EQ(Plan::open(folder / "plan", plan), "");
  Air air; // rank 1 prepares, and is never heard of again
  const std::string digest = plan->digest();
  air.gathered[1].assign(reinterpret_cast<const std::byte *>(digest.data()), reinterpret_cast<const std::byte *>(digest.data()) + digest.size());
  RankMemory memory(*plan, 0);
  const std::unique_ptr<Transport> messages = makeMessageTransport(std::make_unique<SlowWire>(air, 0, 2, 1));
  ASSERT_EQ(messages->prepare(*plan, {memory.local}), "");
  bool late = false;
  EXPECT_EQ(messages->run(std::chrono::steady_clock::now() + std::chrono::milliseconds(20), late), "the deadline passed: message 0 of round 0 from rank 1, chunk 0 of 1");
  EXPECT_TRUE(late);
  EXPECT_EQ(messages->run({}, late), "an earlier run failed with messages on their way, expected a new launch");
}

} // namespace
