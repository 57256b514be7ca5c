// SPDX-License-Identifier: Apache-2.0
#include "executor/backends/liveness_lock.h"

#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <unistd.h>

namespace reshard {

namespace {

/// A lock of fcntl, which belongs to one process: a child that it forks, and that lives longer, does not have it, as it
/// would have one of flock.
struct flock wholeFile() {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

} // namespace

LivenessLock::LivenessLock() {
  const char *folder = std::getenv("PMIX_SERVER_TMPDIR"), *rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK"),
             *size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *world = std::getenv("OMPI_COMM_WORLD_RANK");
  if (!folder || !rank || !size || !world)
    return;
  rank_ = std::atol(rank);
  size_ = std::atol(size);
  folder_ = folder;
  struct flock lock = wholeFile();
  const int mine = open(file(rank_).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); // stays open until the process ends
  const std::string text = std::to_string(getpid()) + " " + world + "\n";
  if (mine < 0 || fcntl(mine, F_SETLK, &lock) != 0 ||
      write(mine, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    folder_.clear();
}

std::string LivenessLock::file(long rank) const { return folder_ + "/reshard." + std::to_string(rank); }

std::string LivenessLock::missing() const {
  if (folder_.empty())
    return "not all ranks have joined";
  std::string text;
  for (long each = 0; each < size_; ++each) {
    if (each == rank_)
      continue;
    long process = 0, rank = -1;
    std::ifstream(file(each)) >> process >> rank;
    std::string why = "has not joined";
    if (const int other = open(file(each).c_str(), O_RDONLY | O_CLOEXEC); other >= 0) {
      struct flock lock = wholeFile();
      why = fcntl(other, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK ? "has ended" : "";
      close(other);
    }
    std::string status;
    for (std::ifstream lines("/proc/" + std::to_string(process) + "/status");
         why.empty() && std::getline(lines, status);)
      if (status.starts_with("State:") &&
          (status.find("T (") != std::string::npos || status.find("t (") != std::string::npos))
        why = "is stopped";
    if (!why.empty())
      text += (text.empty() ? "" : ", ") +
              (rank < 0 ? "local rank " + std::to_string(each) : "rank " + std::to_string(rank)) + " " + why;
  }
  return text.empty() ? "all ranks of this host have joined, but not all ranks of the job are ready" : text;
}

} // namespace reshard
