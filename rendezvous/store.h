// SPDX-License-Identifier: Apache-2.0
// A key-value store that all processes of a job can reach: the only means by which processes with different parents
// find each other. torch.distributed's stores have the same functions.
#pragma once

#include "support/deadline.h"
#include "support/status.h"

#include <string>
#include <string_view>

namespace reshard {

class Store {
public:
  virtual ~Store() = default;

  /// Sets a key, or replaces its value. Other processes see the old value or the new one, never a part.
  virtual Status set(const std::string &key, std::string_view value, const Deadline &deadline) = 0;
  /// The value of a key. Waits until the key is set; an error of kind timedOut if it is not set by the deadline.
  virtual Result<std::string> get(const std::string &key, const Deadline &deadline) = 0;
};

} // namespace reshard
