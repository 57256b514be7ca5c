// SPDX-License-Identifier: Apache-2.0
// The processes of one job find each other: each publishes a hello (its address, in the words of a transport), waits
// until all have joined, and reads the hellos of its peers.
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace reshard {

/// Modules (executor/interfaces/module.cpp) call it across libraries, so it is an interface.
class Rendezvous {
public:
  virtual ~Rendezvous() = default;

  /// The rank of this process, and the number of processes: both as in the plan.
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// Publishes this process's hello and waits until all processes of the job have joined. Fails on all processes if one
  /// refuses, with its reason. Called once.
  virtual Status join(std::string_view hello, const Deadline &deadline) = 0;
  /// The hello of a process that has joined.
  virtual Result<std::string> hello(uint32_t rank, const Deadline &deadline) = 0;
  /// A random number that all processes of this job have, and no process of another job or of an earlier start of this
  /// one. Known after join().
  virtual uint64_t session() const = 0;
};

} // namespace reshard
