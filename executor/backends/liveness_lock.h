// SPDX-License-Identifier: Apache-2.0
// Liveness locks: report which processes of an MPI launch on this host are alive, even before MPI_Init, which returns
// only when all processes have called it.
#pragma once

#include <string>

namespace reshard {

/// Holds a file lock in Open MPI's session folder for as long as this process lives, however long those live that it
/// has forked. Does nothing if the environment does not name that folder.
class LivenessLock {
public:
  LivenessLock();
  /// For an error text: the ranks of this host that have ended, have not joined, or are stopped; if there are none, or
  /// that is unknown, a text that states it.
  std::string missing() const;

private:
  std::string file(long rank) const;

  std::string folder_;
  long rank_ = 0, size_ = 0; // on this host
};

} // namespace reshard
