// SPDX-License-Identifier: Apache-2.0
// Rendezvous: finds this process's rank in the launcher's environment, and broadcasts rank 0's id by a file or a
// channel.
#pragma once

#include "support/deadline.h"
#include "support/status.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace reshard {

/// Rank and size of this process's launch, from the environment; no values if that does not have them. If several
/// launchers left variables, the first of these counts: torchrun (RANK with TORCHELASTIC_RUN_ID), Open MPI, MPICH and
/// other PMI launchers, any launcher that sets RANK, Slurm. A launcher of this list may have been started by a later
/// one.
struct Launch {
  std::optional<uint32_t> rank, size;
  std::optional<uint32_t> localRank; // on its host
  bool mpi = false;                  // started by an MPI launcher
};
Launch findLaunch();

/// Broadcasts rank 0's bytes to all ranks by a file on a shared filesystem. The file must not exist before the launch:
/// rank 0 writes it atomically, the others wait for it.
Status broadcastByFile(const std::string &path, uint32_t rank, std::byte *data, size_t bytes, const Deadline &deadline);

class Channel;
/// The same over a channel, with its request 0 and tag 0.
Status broadcastByChannel(Channel &channel, std::byte *data, size_t bytes, const Deadline &deadline);

} // namespace reshard
