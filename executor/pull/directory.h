// SPDX-License-Identifier: Apache-2.0
// The processes of a fleet, in the job's store. Each process sets `pool/WORLD RANK` under the prefix of the job and its
// plan; a process that starts again replaces it. No process waits for another.
#pragma once

#include "executor/rendezvous/store_rendezvous.h"

namespace reshard::pull {

/// How to connect to a process: the token that it expects, and the address of its server.
struct ServerAddress {
  uint64_t token = 0;
  std::string address;
};

/// One thread uses it.
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
