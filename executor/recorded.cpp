#include "executor/recorded.h"

#include "executor/faces.h"
#include "executor/packing.h"
#include "executor/phases.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace reshard {
namespace {

/// Of a chunk that a rank sends to itself.
constexpr uint64_t kSelfBytes = 64 << 20;

constexpr const char *kAbandoned = "an earlier run failed with messages on their way, expected a new launch";

class RecordedTransport : public Transport {
public:
  RecordedTransport(std::unique_ptr<Device> device, std::unique_ptr<Group> group, RecordedOptions options)
      : group_(std::move(group)), device_(std::move(device)), options_(std::move(options)) {}

  /// All that is bound is memory of the device.
  std::string reach(const Plan &plan, const LocalRank &rank) const override {
    for (uint32_t r = 0; r < rank.runs.size(); ++r) {
      const schema::BufferRun &run = *rank.segment->buffers()->Get(r);
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(run.endpoint());
      for (uint32_t i = 0; i < run.count() && run.bytes() > 0; ++i)
        if (const std::byte *memory = rank.runs[r][i])
          if (std::string error = device_->reach(memory); !error.empty())
            return endpoint.role()->str() + " rank " + std::to_string(rank.rank) + " param '" +
                   endpoint.params()->Get(run.param())->name()->str() + "': " + error;
    }
    return {};
  }

  std::string prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline,
                      bool &timedOut) override {
    std::vector<Operation> operations;
    if (options_.before)
      operations.push_back(options_.before);
    if (std::string error = group_ ? addMessages(plan, ranks, deadline, timedOut, operations)
                                   : addWaves(plan, ranks, operations, bytes_);
        !error.empty())
      return error;
    if (group_) // complete on all ranks, or failed
      operations.push_back(Call([&] { return group_->barrier(device_->stream(), deadline, timedOut); }));
    if (options_.refresh)
      operations.push_back(options_.refresh);
    for (const Operation &operation : operations) {
      const auto *exchange = std::get_if<Exchange>(&operation);
      transfers_.push_back(exchange ? exchange->transfers : std::vector<Transfer>());
    }
    return device_->record(operations, group_.get(), deadline, timedOut);
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
      if (group_)
        if (std::string error = group_->check(); !error.empty())
          return abandon(error + unfinished());
      if (passed(deadline)) {
        timedOut = true;
        return abandon("the deadline passed" + unfinished());
      }
      sched_yield();
    }
    return {};
  }

  std::string enqueue(void *stream) override { return abandoned_ ? kAbandoned : device_->enqueue(stream); }

  std::string least(int64_t mine, int64_t &least, Deadline deadline, bool &timedOut) override {
    if (abandoned_)
      return kAbandoned;
    std::vector<int64_t> all(group_ ? group_->size() : 1, mine);
    std::string error = group_ ? group_->gather(reinterpret_cast<const std::byte *>(&mine), sizeof mine,
                                                reinterpret_cast<std::byte *>(all.data()), deadline, timedOut)
                               : "";
    least = *std::min_element(all.begin(), all.end());
    return error;
  }

  uint64_t bytes() const override { return bytes_; }
  BytesBy bytesBy() const override {
    uint64_t received = 0;
    for (const auto &transfers : transfers_)
      for (const Transfer &transfer : transfers)
        received += transfer.send || transfer.peer == group_->rank() ? 0 : transfer.bytes;
    return {bytes_ - received, 0, received, 0};
  }
  std::string allocate(uint64_t bytes, std::byte *&memory) override { return device_->allocate(bytes, memory); }
  void *stream() const override { return device_->stream(); }

private:
  /// One rank, with messages.
  std::string addMessages(const Plan &plan, const std::vector<LocalRank> &ranks, const Deadline &deadline,
                          bool &timedOut, std::vector<Operation> &operations) {
    if (ranks.size() != 1 || ranks[0].rank != group_->rank())
      return "this process is rank " + std::to_string(group_->rank()) + " of its group and runs that rank alone";
    if (group_->size() != plan.world())
      return "the plan has " + std::to_string(plan.world()) + " ranks, the group " + std::to_string(group_->size()) +
             ", expected as many";
    if (std::string error = agree(plan.digest(), deadline, timedOut); !error.empty())
      return error;
    Staging staging;
    const uint64_t elsewhere =
        ranks[0].transformed + (ranks[0].work ? ranks[0].work->begin() + ranks[0].work->end() : 0);
    if (const uint64_t bytes = ranks[0].segment->arena_bytes() - elsewhere; bytes > 0)
      if (std::string error = device_->allocate(bytes, staging.arena); !error.empty())
        return "an arena of " + std::to_string(bytes) + " bytes: " + error;
    staging.selfBytes = options_.selfMessages ? selfChunk(ranks[0], kSelfBytes) : 0;
    if (staging.selfBytes > 0)
      if (std::string error = device_->allocate(4 * staging.selfBytes, staging.self); !error.empty())
        return "staging of " + std::to_string(4 * staging.selfBytes) + " bytes for messages to itself: " + error;
    staging.partedUnits = partedUnits(ranks[0], staging.selfBytes);
    if (staging.partedUnits > 0)
      if (std::string error = device_->allocate(staging.partedUnits * Parted::kUnit, staging.parted); !error.empty())
        return "staging of " + std::to_string(staging.partedUnits * Parted::kUnit) +
               " bytes for what chunks part: " + error;
    return addPhases(ranks[0], staging, operations, bytes_);
  }

  /// All processes run the same plan.
  std::string agree(const std::string &digest, const Deadline &deadline, bool &timedOut) {
    std::vector<std::byte> all(digest.size() * group_->size());
    if (std::string error = group_->gather(reinterpret_cast<const std::byte *>(digest.data()), digest.size(),
                                           all.data(), deadline, timedOut);
        !error.empty())
      return timedOut ? error + ": not all ranks have come to prepare" : error;
    for (uint32_t rank = 0; rank < group_->size(); ++rank)
      if (std::memcmp(all.data() + rank * digest.size(), digest.data(), digest.size()) != 0)
        return unlikePlans(
            rank, std::string(reinterpret_cast<const char *>(all.data()) + rank * digest.size(), digest.size()),
            group_->rank(), digest);
    return {};
  }

  /// A device goes on with copies that are late; messages whose peer is late would hold it for ever.
  std::string abandon(std::string error) {
    if (group_) {
      abandoned_ = true;
      device_->abandon();
      group_->abandon();
    }
    return error;
  }

  /// What is on its way: the messages of the first group that is not known to be done.
  std::string unfinished() const {
    const size_t begun = device_->begun();
    std::string text;
    for (size_t o = begun; o < transfers_.size() && text.empty(); ++o)
      for (const Transfer &transfer : transfers_[o])
        text += (text.empty() ? ": message " : "; message ") + std::to_string(transfer.message) + " of round " +
                std::to_string(transfer.round) + (transfer.send ? " to rank " : " from rank ") +
                std::to_string(transfer.peer) + ", chunk " + std::to_string(transfer.chunk) + " of " +
                std::to_string(transfer.chunks);
    if (text.empty() && group_)
      return ": ranks that are not done are waited for";
    return text.empty() ? " in operation " + std::to_string(begun) + " of " + std::to_string(transfers_.size()) : text;
  }

  std::unique_ptr<Group> group_; // outlives what the device recorded of it
  std::unique_ptr<Device> device_;
  RecordedOptions options_;
  std::vector<std::vector<Transfer>> transfers_; // by operation
  uint64_t bytes_ = 0;
  bool abandoned_ = false;
};

} // namespace

std::unique_ptr<Transport> makeRecordedTransport(std::unique_ptr<Device> device, std::unique_ptr<Group> group,
                                                 RecordedOptions options) {
  return std::make_unique<RecordedTransport>(std::move(device), std::move(group), std::move(options));
}

} // namespace reshard
