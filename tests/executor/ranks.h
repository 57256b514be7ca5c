// SPDX-License-Identifier: Apache-2.0
// Ranks of a plan with memory, and jobs whose messages have several chunks and are forwarded.
#pragma once

#include "executor/memory/view_jobs.h"
#include "executor/transports/transport.h"
#include "schema/manifest.h"
#include "tests/lib/threads.h"
#include "tests/verify/support.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace reshard::tests {

/// Which ranks' memory local peers can map.
enum class Mappable { nothing, all, some };
/// The memory of one rank's buffers, contiguous, with a guard byte after each.
class RankMemory {
public:
  RankMemory(const Plan &plan, uint32_t rank, Mappable mappable = Mappable::nothing) {
    local.rank = rank;
    if (const Status status = plan.segment(rank, local.segment); !status.ok())
      throw std::runtime_error(status.message());
    bytes_ = 1;
    for (const schema::BufferRange *range : *local.segment->buffers())
      bytes_ += range->count() * (range->bytes() + 1);
    const bool shared = mappable == Mappable::all || (mappable == Mappable::some && rank % 2 == 0);
    if (shared && ((file_ = memfd_create("params", 0)) < 0 || ftruncate(file_, static_cast<off_t>(bytes_)) != 0))
      throw std::runtime_error("no memory");
    memory_ = static_cast<std::byte *>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file_, 0));
    std::memset(memory_, 0xEE, bytes_);
    std::byte *next = memory_;
    for (const schema::BufferRange *range : *local.segment->buffers()) {
      std::vector<std::byte *> &table = tables_.emplace_back();
      for (uint32_t i = 0; i < range->count(); ++i, next += range->bytes() + 1)
        table.push_back(next);
    }
    for (const auto &table : tables_)
      local.memory.push_back(table.data());
    arenaHead_.resize(arenaHeadBytes(*local.segment));
    local.arena = arenaHead_.empty() ? nullptr : arenaHead_.data();
  }
  ~RankMemory() {
    munmap(memory_, bytes_);
    if (file_ >= 0)
      close(file_);
  }

  /// Sets new source values. Replicas get different values, so that tests notice bytes of another replica.
  void fill(uint64_t seed) {
    for (uint32_t r = 0; r < local.segment->buffers()->size(); ++r)
      if (const schema::BufferRange &range = *local.segment->buffers()->Get(r); range.endpoint() == 0)
        for (uint32_t i = 0; i < range.count(); ++i) {
          std::mt19937_64 random(seed * 100 + range.param() * 10 + i + 1000 * range.mesh_rank());
          std::generate_n(local.memory[r][i], range.bytes(), [&] { return static_cast<std::byte>(random()); });
        }
  }

  LocalRank local;
  std::vector<std::byte> bytes() const { return {memory_, memory_ + bytes_}; }

private:
  int file_ = -1;
  std::byte *memory_ = nullptr;
  size_t bytes_ = 0;
  std::deque<std::vector<std::byte *>> tables_;
  std::vector<std::byte> arenaHead_;
};

using Ranks = std::vector<std::unique_ptr<RankMemory>>;

/// All ranks of a plan, with random sources.
inline Ranks fillRanks(const Plan &plan, uint64_t seed) {
  Ranks all;
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    all.push_back(std::make_unique<RankMemory>(plan, rank));
    all.back()->fill(seed);
  }
  return all;
}

/// The ranks as arguments of Transport::prepare.
inline std::vector<LocalRank> locals(const Ranks &ranks) {
  std::vector<LocalRank> result;
  for (const auto &rank : ranks)
    result.push_back(rank->local);
  return result;
}

/// The expected memory of all ranks: sources of a seed, moved by transport `threads`.
inline Ranks copied(const Plan &plan, uint64_t seed, uint64_t *bytes = nullptr) {
  Ranks ranks = fillRanks(plan, seed);
  const std::unique_ptr<Transport> copies = makeThreadsTransport(1);
  EXPECT_EQ(copies->prepare(plan, locals(ranks), {}).message(), "");
  EXPECT_EQ(copies->run({}).message(), "");
  if (bytes)
    *bytes = copies->bytes();
  return ranks;
}

/// Compares the memory of all ranks, byte by byte.
inline void expectSame(const Ranks &expected, const Ranks &found) {
  ASSERT_EQ(expected.size(), found.size());
  for (size_t rank = 0; rank < found.size(); ++rank)
    EXPECT_TRUE(expected[rank]->bytes() == found[rank]->bytes()) << "rank " << rank;
}

/// A rank with memory for the params of all dtypes, each instance with a guard byte behind it; the memory of quantized
/// views is the executor's.
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
        std::vector<std::byte> &memory = memory_.emplace_back(static_cast<size_t>(instance.bytes) + 1, std::byte{0xEE});
        table.push_back(memory.data());
        if (range->endpoint() == 0)
          sources_.emplace_back(&memory, range->param() * 10 + instance.instance + 100 * range->mesh_rank());
      }
    }
    fill(seed);
    for (const auto &table : tables_)
      local.memory.push_back(table.data());
  }

  /// Gives the source other values.
  void fill(uint64_t seed) {
    for (const auto &[memory, number] : sources_) {
      std::mt19937_64 random(seed * 1000 + number);
      std::generate(memory->begin(), memory->end() - 1,
                    [&] { return static_cast<std::byte>(random() % 4 ? random() : random() % 3); });
    }
  }
  Status bind(const Plan &plan, Transport &transport) { return viewJobs_.bind(plan, local, transport); }
  const std::deque<std::vector<std::byte>> &memory() const { return memory_; }

  LocalRank local;

private:
  std::deque<std::vector<std::byte *>> tables_;
  std::deque<std::vector<std::byte>> memory_;
  std::vector<std::pair<std::vector<std::byte> *, uint64_t>> sources_; // instances, and what tells them apart
  ViewJobs viewJobs_;
};

using BoundRanks = std::vector<std::unique_ptr<BoundRank>>;

/// The memory of all ranks after one run of a transport that has all ranks.
inline BoundRanks runAllRanks(const Plan &plan, uint64_t seed, Transport &transport) {
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

namespace detail {
inline const std::string kRelayModel = "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {a: [96, 40], "
                                       "\"r.{l}\": {shape: [96, 48], shard: {0: tp}}, "
                                       "\"c.{l}\": {shape: [64, 48], shard: {1: tp}}}}\n";
/// Tensors of such sizes that chunks have many sizes.
inline const std::string kUnevenModel =
    "version: 1\nmodel: {dtype: bf16, index: {l: 2}, tensors: {a: [96, 40], b: {shape: [5, 36], shard: {1: tp}}, d: "
    "{shape: [24, 240], shard: {1: tp}}, "
    "\"r.{l}\": {shape: [96, 48], shard: {0: tp}}, \"c.{l}\": {shape: [60, 144], shard: {1: tp}}}}\n";
} // namespace detail

/// One message, from rank 1 to rank 0, and a copy.
inline const std::string kTwoRanks = "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [64, 32], shard: {0: "
                                     "tp}}}}\nsource: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 1}}\n";

inline const std::string kRelayJobs[] = {
    detail::kRelayModel + "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 2}, ranks: 1..2}\noptions: {staging: 4KiB}\n",
    detail::kRelayModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4, dp: 2}}\noptions: {staging: 2KiB}\n",
    detail::kRelayModel + "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1, dp: 5}, ranks: 1..5}\noptions: {staging: "
                          "4KiB, topology: {ranks_per_node: 1}}\n",
    detail::kRelayModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2, dp: 3}, ranks: 2..7}\noptions: {staging: "
                          "4KiB, topology: {ranks_per_node: 2}}\n",
    detail::kRelayModel + "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2, dp: 4}}\noptions: {staging: 8KiB, topology: "
                          "{ranks_per_node: 4, nics: {per_node: 1, rate: 100Gb/s}}}\n",
};

/// Jobs in which idle ranks of the senders' node relay, in one phase and in several.
inline const std::string kRelayedJobs[] = {
    detail::kRelayModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4}, ranks: 6..9}\noptions: {topology: "
                          "{ranks_per_node: 6, nics: {per_node: 6, rate: 1MB/s, latency: 1ns}}}\n",
    detail::kRelayModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4}, ranks: 6..9}\noptions: {staging: 8KiB, "
                          "topology: {ranks_per_node: 6, nics: {per_node: 6, rate: 1MB/s, latency: 1ns}}}\n",
};

/// Jobs whose chunks are forwarded at once, and are packed differently for the next hop.
inline const std::string kUnevenJobs[] = {
    detail::kUnevenModel + "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 2, dp: 4}, ranks: 6..13}\noptions: {staging: "
                           "100KiB, topology: {ranks_per_node: 4}}\n",
    detail::kUnevenModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3, dp: 2}, ranks: 6..11}\noptions: {staging: "
                           "100KiB, topology: {ranks_per_node: 2}}\n",
    detail::kUnevenModel + "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 3, dp: 2}}\noptions: {staging: 20KiB, "
                           "topology: {ranks_per_node: 1}}\n",
    detail::kUnevenModel + "source: {mesh: {tp: 3}}\ntarget: {mesh: {tp: 1, dp: 3}, ranks: 6..8}\noptions: {staging: "
                           "8KiB, topology: {ranks_per_node: 4}}\n",
};

/// The jobs of both lists above that do not have chunks of many sizes.
inline std::vector<std::string> relayJobs() {
  std::vector<std::string> jobs(std::begin(kRelayJobs), std::end(kRelayJobs));
  jobs.insert(jobs.end(), std::begin(kRelayedJobs), std::end(kRelayedJobs));
  return jobs;
}

} // namespace reshard::tests
