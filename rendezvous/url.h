// SPDX-License-Identifier: Apache-2.0
// Stores by URL.
#pragma once

#include "rendezvous/hmac.h"
#include "rendezvous/store.h"

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

} // namespace reshard
