// SPDX-License-Identifier: Apache-2.0
// Checkpoints that torch.save wrote: one file, or one of each rank with the rank's parts of distributed tensors.
#pragma once

#include "checkpoints/stored_checkpoint.h"

#include <string>
#include <string_view>

namespace reshard::analysis {

/// Whether a file begins as one of torch.save in the form before PyTorch 1.6, which is no zip and is not read.
bool isLegacyTorchFile(std::string_view file);

/// Whether a folder has files `NAME_rank_R.pt` or `rank_R.pt`.
bool hasTorchRanks(const std::string &folder);

/// Reads a file, or a folder with `model.pt` or with a file of each rank. Of several sets of files, NAME begins with
/// `model`. Errors: a rank without a file; parts of a tensor that are missing or overlap; a tensor that is not
/// distributed and differs between ranks, whose data is compared. Replicas of a distributed tensor are not compared:
/// the part of the lowest rank is taken.
Status readTorchCheckpoint(const std::string &path, StoredCheckpoint &checkpoint);

} // namespace reshard::analysis
