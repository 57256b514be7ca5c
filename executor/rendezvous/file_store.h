// SPDX-License-Identifier: Apache-2.0
// A store in a folder that all processes share: each key is a file.
#pragma once

#include "executor/rendezvous/store.h"

namespace reshard {

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
