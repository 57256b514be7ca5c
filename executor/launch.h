// How the processes of a launch find each other, without a library that launched them.
#pragma once

#include "executor/deadline.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace reshard {

/// This process in its launch, as the environment says; nothing where it does not. Of several launchers the first of:
/// torchrun (RANK beside TORCHELASTIC_RUN_ID), Open MPI, MPICH and other PMI launchers, whoever sets RANK, Slurm. A
/// launcher may have been started by a later one of these.
struct Launch {
  std::optional<uint32_t> rank, size;
  std::optional<uint32_t> localRank; // on its host
  bool mpi = false;                  // an MPI launcher's
};
Launch findLaunch();

/// Makes bytes of rank 0 known to all ranks by a file that all see, which must not be there before: rank 0 writes it,
/// under its name at once or not at all, the others wait for it. An error text, empty on success.
std::string shareByFile(const std::string &path, uint32_t rank, std::byte *data, size_t bytes, const Deadline &deadline,
                        bool &timedOut);

class Channel;
/// The same over a wire, request and tag 0 of which it uses.
std::string shareByChannel(Channel &channel, std::byte *data, size_t bytes, const Deadline &deadline, bool &timedOut);

} // namespace reshard
