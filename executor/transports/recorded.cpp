// SPDX-License-Identifier: Apache-2.0
// Records the operations of a device's run in prepare and replays them; a deadline that passes names the operation.
#include "executor/transports/transport.h"

#include "base/backoff.h"
#include "executor/memory/packing.h"
#include "executor/memory/view_jobs.h"
#include "executor/transports/device_rounds.h"

#include <algorithm>
#include <cstring>

namespace reshard {
namespace {

/// The largest chunk that a rank sends to itself.
constexpr uint64_t kSelfBytes = 64 << 20;

/// Polls before a wait for the device begins to sleep: most runs end before.
constexpr uint64_t kDeviceSpins = 1000;

Status abandonedEarlier() {
  return failed("an earlier run failed with messages in flight; launch the processes again");
}

class RecordedTransport : public Transport {
public:
  RecordedTransport(std::unique_ptr<Device> device, std::unique_ptr<Communicator> communicator, RecordedOptions options)
      : communicator_(std::move(communicator)), device_(std::move(device)), options_(std::move(options)) {}

  /// Checks that all bound memory is the device's.
  Status reach(const Plan &plan, const LocalRank &rank) const override {
    for (uint32_t r = 0; r < rank.memory.size(); ++r) {
      const schema::BufferRange &range = *rank.segment->buffers()->Get(r);
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(range.endpoint());
      for (uint32_t i = 0; i < range.count() && range.bytes() > 0; ++i)
        if (const std::byte *memory = rank.memory[r][i])
          if (const Status status = device_->reach(memory); !status.ok())
            return badBinding(endpoint.role()->str() + " rank " + std::to_string(rank.rank) + " param '" +
                              endpoint.params()->Get(range.param())->name()->str() + "': " + status.message());
    }
    return {};
  }

  Status prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline) override {
    std::vector<Operation> operations;
    if (options_.before)
      operations.push_back(options_.before);
    if (Status status = communicator_ ? addMessages(plan, ranks, deadline, operations)
                                      : addDependencyLevels(plan, ranks, operations, bytes_);
        !status.ok())
      return status;
    if (communicator_) // the run is complete when all ranks are done
      operations.push_back(Call([&] { return communicator_->barrier(device_->stream(), deadline); }));
    if (options_.refresh)
      operations.push_back(options_.refresh);
    for (const Operation &operation : operations) {
      const auto *batch = std::get_if<P2pBatch>(&operation);
      ops_.push_back(batch ? batch->ops : std::vector<P2pOp>());
    }
    return device_->record(operations, communicator_.get(), deadline);
  }

  Status run(Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    if (Status status = device_->replay(); !status.ok())
      return abandon(std::move(status));
    Backoff backoff(kDeviceSpins);
    while (true) {
      const Result<bool> done = device_->done();
      if (!done.ok())
        return abandon(done.status());
      if (*done)
        return {};
      if (communicator_)
        if (Status status = communicator_->check(); !status.ok())
          return abandon(std::move(status).withSuffix(unfinished()));
      if (passed(deadline))
        return abandon(timedOut("timed out" + unfinished()));
      backoff.wait();
    }
  }

  Status enqueue(void *stream) override { return abandoned_ ? abandonedEarlier() : device_->enqueue(stream); }

  Result<int64_t> allReduceMin(int64_t value, Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    std::vector<int64_t> all(communicator_ ? communicator_->size() : 1, value);
    if (communicator_)
      if (Status status = communicator_->allGather(reinterpret_cast<const std::byte *>(&value), sizeof value,
                                                   reinterpret_cast<std::byte *>(all.data()), deadline);
          !status.ok())
        return status;
    return *std::min_element(all.begin(), all.end());
  }

  Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t> values, Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    if (!communicator_)
      return values;
    std::vector<uint64_t> sums(values.size());
    constexpr size_t kAtOnce = 4096; // numbers of a rank, for which the communicator has memory of all ranks
    std::vector<uint64_t> all(communicator_->size() * std::min(kAtOnce, values.size()));
    for (size_t at = 0; at < values.size(); at += kAtOnce) {
      const size_t some = std::min(kAtOnce, values.size() - at);
      if (Status status =
              communicator_->allGather(reinterpret_cast<const std::byte *>(&values[at]), some * sizeof(uint64_t),
                                       reinterpret_cast<std::byte *>(all.data()), deadline);
          !status.ok())
        return status;
      for (size_t rank = 0; rank < communicator_->size(); ++rank)
        for (size_t i = 0; i < some; ++i)
          sums[at + i] += all[rank * some + i];
    }
    return sums;
  }

  Device *device() override { return device_.get(); }

  uint64_t bytes() const override { return bytes_; }
  BytesBy bytesBy() const override {
    uint64_t received = 0;
    for (const auto &ops : ops_)
      for (const P2pOp &op : ops)
        received += op.send || op.peer == communicator_->rank() ? 0 : op.bytes;
    return {bytes_ - received, 0, received, 0};
  }
  Result<std::byte *> allocate(uint64_t bytes) override { return device_->allocate(bytes); }
  void *stream() const override { return device_->stream(); }

private:
  /// Adds the operations of one rank with messages.
  Status addMessages(const Plan &plan, const std::vector<LocalRank> &ranks, const Deadline &deadline,
                     std::vector<Operation> &operations) {
    if (ranks.size() != 1 || ranks[0].rank != communicator_->rank())
      return failed("this process is rank " + std::to_string(communicator_->rank()) +
                    " of the communicator, expected it to run exactly that rank");
    if (communicator_->size() != plan.world())
      return failed("the communicator has " + std::to_string(communicator_->size()) + " ranks, expected " +
                    std::to_string(plan.world()) + " as the plan");
    if (Status status = compareDigests(plan.digest(), deadline); !status.ok())
      return status;
    Staging staging;
    // This memory is allocated by Transforms and ViewJobs.
    const uint64_t elsewhere =
        ranks[0].transformed +
        (ranks[0].viewJobs ? ranks[0].viewJobs->headBytes() + ranks[0].viewJobs->tailBytes() : 0);
    if (Status status = allocate(ranks[0].segment->arena_bytes() - elsewhere, "an arena", staging.arena); !status.ok())
      return status;
    staging.selfBytes = options_.selfMessages ? selfChunk(ranks[0], kSelfBytes) : 0;
    if (Status status = allocate(4 * staging.selfBytes, "staging for messages of the rank to itself", staging.self);
        !status.ok())
      return status;
    staging.splitBlockCount = splitBlockCount(ranks[0], staging.selfBytes);
    if (Status status = allocate(staging.splitBlockCount * SplitBlocks::kBytes,
                                 "elements or blocks that chunk boundaries split", staging.splitBlocks);
        !status.ok())
      return status;
    return addRounds(ranks[0], staging, operations, bytes_);
  }

  /// Allocates device memory, if `bytes` is not 0. `use` is for the error text.
  Status allocate(uint64_t bytes, const char *use, std::byte *&memory) {
    if (bytes == 0)
      return {};
    const Result<std::byte *> allocated = device_->allocate(bytes);
    if (!allocated.ok())
      return Status(allocated.status())
          .withPrefix("cannot allocate " + std::to_string(bytes) + " bytes for " + use + ": ");
    memory = *allocated;
    return {};
  }

  /// Checks that all processes run the same plan.
  Status compareDigests(const std::string &digest, const Deadline &deadline) {
    std::vector<std::byte> all(digest.size() * communicator_->size());
    if (Status status = communicator_->allGather(reinterpret_cast<const std::byte *>(digest.data()), digest.size(),
                                                 all.data(), deadline);
        !status.ok())
      return status.timedOut() ? std::move(status).withSuffix(": not all ranks have reached prepare") : status;
    for (uint32_t rank = 0; rank < communicator_->size(); ++rank)
      if (std::memcmp(all.data() + rank * digest.size(), digest.data(), digest.size()) != 0)
        return planMismatch(
            rank, std::string(reinterpret_cast<const char *>(all.data()) + rank * digest.size(), digest.size()),
            communicator_->rank(), digest);
    return {};
  }

  /// Without a communicator a late run still completes. Messages whose peer is gone would occupy the device forever, so
  /// they are aborted.
  Status abandon(Status status) {
    if (communicator_) {
      abandoned_ = true;
      device_->abandon();
      communicator_->abandon();
    }
    return status;
  }

  /// The unfinished work, for an error text: the messages of the first batch that is not known to be done.
  std::string unfinished() const {
    const size_t begun = device_->begun();
    std::string text;
    for (size_t o = begun; o < ops_.size() && text.empty(); ++o)
      for (const P2pOp &op : ops_[o])
        text += (text.empty() ? ": message " : "; message ") + std::to_string(op.message) + " of round " +
                std::to_string(op.round) + (op.send ? " to rank " : " from rank ") + std::to_string(op.peer) +
                ", chunk " + std::to_string(op.chunk) + " of " + std::to_string(op.chunks);
    if (text.empty() && communicator_)
      return ": waiting for other ranks to finish";
    return text.empty() ? " in operation " + std::to_string(begun) + " of " + std::to_string(ops_.size()) : text;
  }

  std::unique_ptr<Communicator> communicator_; // must outlive the device, which has recorded its messages
  std::unique_ptr<Device> device_;
  RecordedOptions options_;
  std::vector<std::vector<P2pOp>> ops_; // by operation
  uint64_t bytes_ = 0;
  bool abandoned_ = false;
};

} // namespace

std::unique_ptr<Transport> makeRecordedTransport(std::unique_ptr<Device> device,
                                                 std::unique_ptr<Communicator> communicator, RecordedOptions options) {
  return std::make_unique<RecordedTransport>(std::move(device), std::move(communicator), std::move(options));
}

} // namespace reshard
