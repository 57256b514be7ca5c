// SPDX-License-Identifier: Apache-2.0
// Compares parts of tensors that several files of a checkpoint have: replicas of a DTensor in the files of ranks
// (HSDP).
#pragma once

#include "checkpoints/stored_checkpoint.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::analysis {

struct StoredReplicaResult {
  uint64_t comparedBytes = 0;
  std::vector<std::string> differences; // in the order of the replicas
};

/// Reads the replicas of a checkpoint and what they replicate, on `threads` threads, in pieces of 256 KiB. `progress`
/// is called on this thread, with the fraction that is done. An error: a file that cannot be read.
Result<StoredReplicaResult> compareStoredReplicas(const std::string &path, const std::vector<StoredReplica> &replicas,
                                                  unsigned threads, const std::function<void(double)> &progress);

} // namespace reshard::analysis
