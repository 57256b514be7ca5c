// SPDX-License-Identifier: Apache-2.0
// A device and a communicator on the CPU, with the weakest guarantees of a GPU and NCCL. A worker thread replays the
// recorded operations: blocks and threads of a launch run in random order; the concurrent launch of a batch runs before
// or after it; a send completes only when its receive has copied the bytes out of the sender's memory; sends and
// receives of a pair of ranks match in their order.
#pragma once

#include "executor/interfaces/communicator.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace reshard::tests {

class CpuDevice : public Device {
public:
  explicit CpuDevice(uint64_t seed) : random_(seed) {}
  ~CpuDevice() override {
    if (worker_.joinable())
      worker_.join();
    for (void *memory : memory_)
      std::free(memory);
  }

  int number() const override { return 0; }
  Result<std::byte *> allocate(uint64_t bytes) override {
    memory_.push_back(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset(memory_.back(), 0, bytes);
    return static_cast<std::byte *>(memory_.back());
  }
  Status copy(std::byte *target, const std::byte *source, uint64_t bytes) override {
    std::memcpy(target, source, bytes);
    return {};
  }
  Status digest(const kernels::DigestTable &table, std::vector<uint64_t> &sums) override {
    if (!table.empty())
      inAnyOrder(kernels::kBlockThreads, [&](uint32_t block, uint32_t blocks, uint32_t thread) {
        kernels::digestThread(table.view(sums.data()), block, blocks, thread);
      });
    ++digests;
    return {};
  }
  Status reach(const std::byte *memory) override {
    return memory == unreachable ? failed("found host memory, expected memory of the device") : Status();
  }

  Status record(const std::vector<Operation> &operations, Communicator *communicator, const Deadline &) override {
    operations_ = operations;
    communicator_ = communicator;
    for (const Operation &operation : operations)
      if (const Call *call = std::get_if<Call>(&operation))
        if (Status status = (*call)(); !status.ok())
          return status;
    return {};
  }
  Status replay() override {
    done_ = false;
    worker_ = std::thread([this] {
      for (size_t o = 0; o < operations_.size() && status_.ok(); ++o) {
        begun_ = o;
        if (const auto *tables = std::get_if<Tables>(&operations_[o]))
          launch(*tables);
        if (const auto *batch = std::get_if<P2pBatch>(&operations_[o])) {
          const bool first = random_() % 2 == 0; // launch and batch are independent, so either may run first
          if (first)
            launch(batch->concurrent);
          status_ = communicator_->exchange(batch->ops, nullptr, {});
          if (!first)
            launch(batch->concurrent);
        }
      }
      done_ = true;
    });
    return {};
  }
  /// The refit on the caller's stream is complete when this returns.
  Status enqueue(void *stream) override {
    enqueuedOn = stream;
    Status started = replay();
    worker_.join();
    return started.ok() ? status_ : started;
  }
  Result<bool> done() override {
    if (!done_)
      return false;
    worker_.join();
    if (!status_.ok())
      return status_;
    return true;
  }
  size_t begun() const override { return begun_; }
  void abandon() override {} // CpuCommunicator::abandon ends the wait of the worker
  void *stream() const override { return const_cast<CpuDevice *>(this); }

  std::byte *unreachable = nullptr;
  uint64_t digests = 0; // calls of digest()
  void *enqueuedOn = nullptr;
  const std::vector<Operation> &operations() const { return operations_; }

private:
  /// Calls each(block, blocks, number) for `count` numbers of a random count of blocks, in random order.
  template <class Each> void inAnyOrder(uint32_t count, Each each) {
    const auto blocks = static_cast<uint32_t>(1 + random_() % 4);
    std::vector<uint32_t> order(blocks * count);
    for (uint32_t i = 0; i < order.size(); ++i)
      order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    for (const uint32_t i : order)
      each(i % blocks, blocks, i / blocks);
  }

  void launch(const Tables &tables) {
    using namespace kernels;
    auto copy = [&](const CopyTable &table) {
      if (!table.empty())
        inAnyOrder(kBlockThreads, [&](uint32_t block, uint32_t blocks, uint32_t thread) {
          copyThread(table.view(), block, blocks, thread);
        });
    };
    copy(tables.copies);
    if (!tables.conversions.empty())
      inAnyOrder(kBlockThreads / kWarpThreads, [&](uint32_t block, uint32_t blocks, uint32_t warp) {
        convertWarp(tables.conversions.view(), block, blocks, warp, 0);
      });
    copy(tables.rest);
  }

  std::mt19937_64 random_;
  std::vector<void *> memory_;
  std::vector<Operation> operations_;
  Communicator *communicator_ = nullptr;
  std::thread worker_;
  std::atomic<bool> done_{true};
  std::atomic<size_t> begun_{0};
  Status status_; // of the last replay
};

/// Connects the communicators of all ranks, which are threads of this process.
struct FakeFabric {
  struct Offer {
    const std::byte *memory;
    uint64_t bytes;
    bool taken = false;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Offer *>> offers; // from, to
  std::map<uint32_t, std::vector<std::byte>> gathered;
};

class CpuCommunicator : public Communicator {
public:
  CpuCommunicator(FakeFabric &fabric, uint32_t rank, uint32_t size) : fabric_(fabric), rank_(rank), size_(size) {}

  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return size_; }
  Status allGather(const std::byte *mine, size_t bytes, std::byte *all, const Deadline &) override {
    std::unique_lock lock(fabric_.mutex);
    fabric_.gathered[rank_].assign(mine, mine + bytes);
    fabric_.changed.notify_all();
    fabric_.changed.wait(lock, [this] { return fabric_.gathered.size() == size_; });
    for (uint32_t rank = 0; rank < size_; ++rank)
      std::memcpy(all + rank * bytes, fabric_.gathered[rank].data(), bytes);
    return {};
  }
  Status exchange(const std::vector<P2pOp> &ops, void *, const Deadline &) override {
    std::unique_lock lock(fabric_.mutex);
    std::deque<FakeFabric::Offer> mine;
    std::map<uint32_t, std::deque<const P2pOp *>> wanted; // by peer
    for (const P2pOp &op : ops)
      if (op.send) {
        mine.push_back({op.memory, op.bytes});
        fabric_.offers[{rank_, op.peer}].push_back(&mine.back());
      } else {
        wanted[op.peer].push_back(&op);
      }
    fabric_.changed.notify_all();
    while (!abandoned_) {
      for (auto &[peer, receives] : wanted)
        for (auto &offers = fabric_.offers[{peer, rank_}]; !receives.empty() && !offers.empty();
             fabric_.changed.notify_all()) {
          if (offers.front()->bytes != receives.front()->bytes)
            return failed("received a message of " + std::to_string(offers.front()->bytes) + " bytes, expected " +
                          std::to_string(receives.front()->bytes));
          std::memcpy(receives.front()->memory, offers.front()->memory, offers.front()->bytes);
          offers.front()->taken = true;
          offers.pop_front();
          receives.pop_front();
        }
      if (std::all_of(wanted.begin(), wanted.end(), [](const auto &each) { return each.second.empty(); }) &&
          std::all_of(mine.begin(), mine.end(), [](const FakeFabric::Offer &offer) { return offer.taken; }))
        return {};
      fabric_.changed.wait_for(lock, std::chrono::milliseconds(5));
    }
    return failed("abandoned");
  }
  Status barrier(void *, const Deadline &) override {
    ++barriers;
    return {};
  }
  Status check() override { return {}; }
  void abandon() override { abandoned_ = true; }

  int barriers = 0;

private:
  FakeFabric &fabric_;
  const uint32_t rank_, size_;
  std::atomic<bool> abandoned_{false};
};

} // namespace reshard::tests
