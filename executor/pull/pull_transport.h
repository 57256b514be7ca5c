// SPDX-License-Identifier: Apache-2.0
// Transport `ucx` in pull mode: one rank of the fleet in this process. No process waits for another, except in pull()
// and release().
#pragma once

#include "executor/memory/view_jobs.h"
#include "executor/pull/puller.h"
#include "executor/transports/transport.h"

namespace reshard::pull {

struct PullOptions {
  Fleet fleet;
  uint32_t worldRank = 0;
  Store *store = nullptr;                                   // outlives the transport
  JobOptions job;                                           // its rank is the world rank
  std::function<Result<std::unique_ptr<Messenger>>()> open; // called twice
  uint64_t rangeBytes = kRangeBytes;
};

class PullTransport : public Transport {
public:
  explicit PullTransport(PullOptions options) : options_(std::move(options)) {}
  ~PullTransport() override;

  Status prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline) override;
  Status run(Deadline) override { return invalid("run in pull mode, expected publish, release or pull"); }
  Result<int64_t> allReduceMin(int64_t, Deadline) override {
    return invalid("all_reduce_min in pull mode, in which processes join and leave");
  }
  Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t>, Deadline) override {
    return invalid("digests in pull mode, in which processes join and leave");
  }
  Status enqueue(void *) override { return invalid("enqueue in pull mode, expected publish, release or pull"); }
  uint64_t bytes() const override { return by_.local + by_.messages; }
  BytesBy bytesBy() const override { return by_; }

  bool isSource() const { return !options_.fleet.isTarget(options_.worldRank); }
  /// On a source. `prepareSend` writes memory that will be read; it is called if the version may be published.
  /// `digest`, if given, is called after it and returns the partial digests of this rank, so that pulls can be checked.
  Status publish(uint64_t version, const std::function<Status()> &prepareSend,
                 const std::function<Result<std::vector<CountedDigest>>()> &digest = {});
  Status release(const Deadline &deadline) { return server_->release(deadline); }
  /// On a target.
  Result<uint64_t> pull(PullRequest request);
  /// The number of clients that read the served version.
  size_t leases() { return server_->leases(); }
  Result<std::vector<ReplicaInfo>> replicas(const Deadline &deadline) { return puller_->replicas(deadline); }

private:
  Status start(const Deadline &deadline);
  Status findSources(const Deadline &deadline);
  Status runViewJobs(ViewJobs::JobSet set, const Deadline &deadline) const;

  const PullOptions options_;
  const ViewJobs *viewJobs_ = nullptr;
  MessageTable table_;
  std::unique_ptr<PullProgress> progress_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Puller> puller_;
  BytesBy by_;
};

} // namespace reshard::pull
