// SPDX-License-Identifier: Apache-2.0
// Stores by URL.
#pragma once

#include "executor/rendezvous/hmac.h"
#include "executor/rendezvous/store_rendezvous.h"

#include <memory>

namespace reshard {

struct StoreOptions {
  std::string url;     // tcp://host:port, or file:///folder
  bool serves = false; // this process is rank 0, which serves tcp://
  Authenticator authenticator;
  bool insecure = false;
};

/// Opens a store; waits until the deadline for rank 0 to serve it.
Result<std::unique_ptr<Store>> openStore(const StoreOptions &options, const Deadline &deadline);

/// Checks what openStore needs, without waiting for rank 0: the form of the URL, that a folder is there, that a host
/// needs no secret.
Status checkStore(const StoreOptions &options, const Deadline &deadline);

/// As rank 0, which could not serve its store: tells the other processes of the job why, for some seconds at most.
void tellWhyNotServed(const StoreOptions &options, const JobOptions &job, const Status &reason,
                      const Deadline &deadline);

} // namespace reshard
