// SPDX-License-Identifier: Apache-2.0
// Opens the rendezvous that the caller's options name.
#pragma once

#include "executor/interfaces/transport_traits.h"
#include "executor/rendezvous/store_rendezvous.h"
#include "reshard/reshard.h"

#include <memory>

namespace reshard {

/// A process's rendezvous, and the store that it uses.
struct JobConnection {
  std::shared_ptr<Store> store; // shared by the rendezvous of all plans of an executor that name no URL of their own
  std::unique_ptr<StoreRendezvous> rendezvous; // null: the transport has no rendezvous
  JobOptions job;
};

/// The process that joins: the digest of its plan, the rank that the caller gave, the number of ranks.
struct JobProcess {
  std::string plan;
  std::optional<uint32_t> rank; // no value: env:// has it
  uint32_t size = 1;            // 0: not known, to report a failure
  bool pull = false;            // replicas have ranks beyond `size`, and no process waits for another
};

/// Checks that transport and device are known and fit, and that the options give one rendezvous at most, and only for a
/// transport that has one. Returns the row of the transport.
Result<const TransportTraits *> checkOptions(const reshard_options &options);

/// Checks what connectJob needs, without waiting for another process.
Status checkRendezvous(const reshard_options &options, const Deadline &deadline);

/// Opens the store; waits until the deadline for rank 0 to serve it. `url`: of the options, or the default of the
/// transport. `opened`: a store that is used in place of the URL's, or null.
Result<JobConnection> connectJob(const reshard_options &options, const std::string &url, const JobProcess &process,
                                 const Deadline &deadline, std::shared_ptr<Store> opened = nullptr);

/// Tells the processes of a job that wait for this one in open why it will not join. `rank`: no value: env:// has it.
Status reportFailureToJob(const reshard_options &options, std::optional<uint32_t> rank, const Status &reason,
                          const Deadline &deadline);

} // namespace reshard
