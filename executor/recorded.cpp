#include "executor/recorded.h"

#include "executor/device_rounds.h"
#include "executor/packing.h"
#include "executor/view_jobs.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace reshard {
namespace {

/// The largest chunk that a rank sends to itself.
constexpr uint64_t kSelfBytes = 64 << 20;

constexpr const char *kAbandoned = "an earlier run failed with messages in flight; launch the processes again";

class RecordedTransport : public Transport {
public:
  RecordedTransport(std::unique_ptr<Device> device, std::unique_ptr<Communicator> communicator, RecordedOptions options)
      : communicator_(std::move(communicator)), device_(std::move(device)), options_(std::move(options)) {}

  /// Checks that all bound memory is the device's.
  std::string reach(const Plan &plan, const LocalRank &rank) const override {
    for (uint32_t r = 0; r < rank.memory.size(); ++r) {
      const schema::BufferRange &range = *rank.segment->buffers()->Get(r);
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(range.endpoint());
      for (uint32_t i = 0; i < range.count() && range.bytes() > 0; ++i)
        if (const std::byte *memory = rank.memory[r][i])
          if (std::string error = device_->reach(memory); !error.empty())
            return endpoint.role()->str() + " rank " + std::to_string(rank.rank) + " param '" +
                   endpoint.params()->Get(range.param())->name()->str() + "': " + error;
    }
    return {};
  }

  std::string prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline,
                      bool &timedOut) override {
    std::vector<Operation> operations;
    if (options_.before)
      operations.push_back(options_.before);
    if (std::string error = communicator_ ? addMessages(plan, ranks, deadline, timedOut, operations)
                                          : addDependencyLevels(plan, ranks, operations, bytes_);
        !error.empty())
      return error;
    if (communicator_) // the run is complete when all ranks are done
      operations.push_back(Call([&] { return communicator_->barrier(device_->stream(), deadline, timedOut); }));
    if (options_.refresh)
      operations.push_back(options_.refresh);
    for (const Operation &operation : operations) {
      const auto *batch = std::get_if<P2pBatch>(&operation);
      ops_.push_back(batch ? batch->ops : std::vector<P2pOp>());
    }
    return device_->record(operations, communicator_.get(), deadline, timedOut);
  }

  std::string run(Deadline deadline, bool &timedOut) override {
    if (abandoned_)
      return kAbandoned;
    if (std::string error = device_->replay(); !error.empty())
      return abandon(error);
    for (bool done = false; !done;) {
      if (std::string error = device_->done(done); !error.empty())
        return abandon(error);
      if (done)
        break;
      if (communicator_)
        if (std::string error = communicator_->check(); !error.empty())
          return abandon(error + unfinished());
      if (passed(deadline)) {
        timedOut = true;
        return abandon("timed out" + unfinished());
      }
      sched_yield();
    }
    return {};
  }

  std::string enqueue(void *stream) override { return abandoned_ ? kAbandoned : device_->enqueue(stream); }

  std::string allReduceMin(int64_t value, int64_t &result, Deadline deadline, bool &timedOut) override {
    if (abandoned_)
      return kAbandoned;
    std::vector<int64_t> all(communicator_ ? communicator_->size() : 1, value);
    std::string error = communicator_
                            ? communicator_->allGather(reinterpret_cast<const std::byte *>(&value), sizeof value,
                                                       reinterpret_cast<std::byte *>(all.data()), deadline, timedOut)
                            : "";
    result = *std::min_element(all.begin(), all.end());
    return error;
  }

  uint64_t bytes() const override { return bytes_; }
  BytesBy bytesBy() const override {
    uint64_t received = 0;
    for (const auto &ops : ops_)
      for (const P2pOp &op : ops)
        received += op.send || op.peer == communicator_->rank() ? 0 : op.bytes;
    return {bytes_ - received, 0, received, 0};
  }
  std::string allocate(uint64_t bytes, std::byte *&memory) override { return device_->allocate(bytes, memory); }
  void *stream() const override { return device_->stream(); }

private:
  /// Adds the operations of one rank with messages.
  std::string addMessages(const Plan &plan, const std::vector<LocalRank> &ranks, const Deadline &deadline,
                          bool &timedOut, std::vector<Operation> &operations) {
    if (ranks.size() != 1 || ranks[0].rank != communicator_->rank())
      return "this process is rank " + std::to_string(communicator_->rank()) +
             " of the communicator, expected it to run exactly that rank";
    if (communicator_->size() != plan.world())
      return "the communicator has " + std::to_string(communicator_->size()) + " ranks, expected " +
             std::to_string(plan.world()) + " as the plan";
    if (std::string error = compareDigests(plan.digest(), deadline, timedOut); !error.empty())
      return error;
    Staging staging;
    // This memory is allocated by Transforms and ViewJobs.
    const uint64_t elsewhere =
        ranks[0].transformed +
        (ranks[0].viewJobs ? ranks[0].viewJobs->headBytes() + ranks[0].viewJobs->tailBytes() : 0);
    if (const uint64_t bytes = ranks[0].segment->arena_bytes() - elsewhere; bytes > 0)
      if (std::string error = device_->allocate(bytes, staging.arena); !error.empty())
        return "cannot allocate an arena of " + std::to_string(bytes) + " bytes: " + error;
    staging.selfBytes = options_.selfMessages ? selfChunk(ranks[0], kSelfBytes) : 0;
    if (staging.selfBytes > 0)
      if (std::string error = device_->allocate(4 * staging.selfBytes, staging.self); !error.empty())
        return "cannot allocate " + std::to_string(4 * staging.selfBytes) +
               " bytes of staging for messages of the rank to itself: " + error;
    staging.splitUnitCount = splitUnitCount(ranks[0], staging.selfBytes);
    if (staging.splitUnitCount > 0)
      if (std::string error = device_->allocate(staging.splitUnitCount * SplitUnits::kUnit, staging.splitUnits);
          !error.empty())
        return "cannot allocate " + std::to_string(staging.splitUnitCount * SplitUnits::kUnit) +
               " bytes for units that chunk boundaries split: " + error;
    return addRounds(ranks[0], staging, operations, bytes_);
  }

  /// Checks that all processes run the same plan.
  std::string compareDigests(const std::string &digest, const Deadline &deadline, bool &timedOut) {
    std::vector<std::byte> all(digest.size() * communicator_->size());
    if (std::string error = communicator_->allGather(reinterpret_cast<const std::byte *>(digest.data()), digest.size(),
                                                     all.data(), deadline, timedOut);
        !error.empty())
      return timedOut ? error + ": not all ranks have reached prepare" : error;
    for (uint32_t rank = 0; rank < communicator_->size(); ++rank)
      if (std::memcmp(all.data() + rank * digest.size(), digest.data(), digest.size()) != 0)
        return planMismatch(
            rank, std::string(reinterpret_cast<const char *>(all.data()) + rank * digest.size(), digest.size()),
            communicator_->rank(), digest);
    return {};
  }

  /// Without a communicator a late run still completes. Messages whose peer is gone would occupy the device forever, so
  /// they are aborted.
  std::string abandon(std::string error) {
    if (communicator_) {
      abandoned_ = true;
      device_->abandon();
      communicator_->abandon();
    }
    return error;
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
