// SPDX-License-Identifier: Apache-2.0
// Checkpoints that torch.save wrote: one file, or one of each rank with the rank's parts of distributed tensors.
#pragma once

#include "analysis/checkpoints/stored_checkpoint.h"

#include <string>

namespace reshard::analysis {

/// Whether a folder has files `NAME_rank_R.pt` or `rank_R.pt`.
bool hasTorchRanks(const std::string &folder);

/// Reads a file, or a folder with `model.pt` or with a file of each rank. Of several sets of files, NAME begins with
/// `model`. Errors: a rank without a file; parts of a tensor that are missing or overlap; a tensor that is not
/// distributed and differs between ranks, whose data is compared.
Status readTorchCheckpoint(const std::string &path, StoredCheckpoint &checkpoint);

} // namespace reshard::analysis
