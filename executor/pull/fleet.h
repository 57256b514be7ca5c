// SPDX-License-Identifier: Apache-2.0
// The ranks of a fleet in pull mode, and its processes in the job's store.
#pragma once

#include "executor/load/load.h"
#include "executor/pull/coordinator.h"
#include "executor/rendezvous/store_rendezvous.h"
#include "schema/limits.h"

#include <string>
#include <vector>

namespace reshard::pull {

using schema::kMaxReplicas;

/// The plan has the ranks of the source and of replica 0; rank i of replica k has world rank base + k * (ranks of a
/// replica) + i.
class Fleet {
public:
  /// Fails, with kind `invalid`, if the plan's target has no engine replicas.
  static Result<Fleet> of(const Plan &plan);

  /// World ranks of the source, by mesh rank.
  const std::vector<uint32_t> &sources() const { return sources_; }
  uint32_t replicaRanks() const { return replicaRanks_; }
  bool isTarget(uint32_t worldRank) const {
    return worldRank >= base_ && (worldRank - base_) / replicaRanks_ < kMaxReplicas;
  }
  /// The mesh rank of a world rank of the source; no value if it is not one.
  std::optional<uint32_t> sourceMeshRank(uint32_t worldRank) const;
  /// The replica and the mesh rank of a world rank of the target.
  uint32_t replicaOf(uint32_t worldRank) const { return (worldRank - base_) / replicaRanks_; }
  uint32_t meshRankOf(uint32_t worldRank) const { return (worldRank - base_) % replicaRanks_; }
  uint32_t worldRank(uint32_t replica, uint32_t meshRank) const { return base_ + replica * replicaRanks_ + meshRank; }
  /// The rank whose segment of the plan a world rank runs.
  uint32_t planRank(uint32_t worldRank) const { return worldRank < base_ ? worldRank : base_ + meshRankOf(worldRank); }
  /// "replica 2 rank 1 (world rank 7)", "source rank 0 (world rank 0)".
  std::string name(uint32_t worldRank) const;

private:
  std::vector<uint32_t> sources_;
  uint32_t base_ = 0, replicaRanks_ = 1;
};

/// How to connect to a process: the token that it expects, and the address of its server.
struct ServerAddress {
  uint64_t token = 0;
  std::string address;
};

/// Each process sets `pool/WORLD RANK` under the prefix of the job and its plan; a process that starts again replaces
/// it. No process waits for another. One thread uses it.
class Directory {
public:
  /// `job.rank` is the world rank of this process. The store must outlive it.
  Directory(Store &store, JobOptions job);

  /// The token of this process; not 0.
  uint64_t token() const { return own_.token; }
  Status enter(const std::string &address, const Deadline &deadline);
  /// No value: the process has not entered, or what it has set was not made by this job.
  Result<std::optional<ServerAddress>> find(uint32_t worldRank, const Deadline &deadline);
  /// Why a process cannot be found, for error texts: " (rank 3 has opened plan X, …)"; empty if nothing is known.
  std::string note(uint32_t worldRank);

private:
  std::string key(uint32_t worldRank) const;

  Store &store_;
  const JobOptions job_;
  Hello own_;
  std::string problem_; // why the last record was refused
};

} // namespace reshard::pull
