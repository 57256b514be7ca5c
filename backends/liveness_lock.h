// Who of the processes that a launcher started on this host is there: known before MPI_Init, which only returns when
// all are.
#pragma once

#include <string>

namespace reshard {

/// This process holds a lock on a file of its rank in the launcher's session folder for as long as it lives. Nothing
/// where no launcher says where that is.
class LivenessLock {
public:
  LivenessLock();
  /// The ranks of this host that have ended, have not come, or are stopped, as words for an error; or what else is
  /// known.
  std::string missing() const;

private:
  std::string file(long rank) const;

  std::string folder_;
  long rank_ = 0, size_ = 0; // on this host
};

} // namespace reshard
