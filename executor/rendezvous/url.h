// SPDX-License-Identifier: Apache-2.0
// Stores by URL, and the store in a folder.
#pragma once

#include "executor/rendezvous/records.h"
#include "executor/rendezvous/store.h"
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

/// A store in a folder that all processes share: each key is a file.
class FileStore : public Store {
public:
  /// `anyUser`: values that another user wrote are accepted.
  FileStore(std::string folder, bool anyUser) : folder_(std::move(folder)), anyUser_(anyUser) {}
  /// Checks the folder. Makes it if its parent exists: a parent that is missing on one host is not the shared one.
  Status open() const;

  Status set(const std::string &key, std::string_view value, const Deadline &deadline) override;
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) override;

private:
  std::string path(const std::string &key) const;

  const std::string folder_;
  const bool anyUser_;
};

} // namespace reshard
