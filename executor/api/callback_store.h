// SPDX-License-Identifier: Apache-2.0
// The caller's store (reshard_store) as a Store.
#pragma once

#include "executor/rendezvous/store.h"
#include "reshard/reshard.h"

namespace reshard {

class CallbackStore : public Store {
public:
  explicit CallbackStore(const reshard_store &store) : store_(store) {}

  Status set(const std::string &key, std::string_view value, const Deadline &deadline) override;
  Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) override;

private:
  const reshard_store store_;
};

} // namespace reshard
