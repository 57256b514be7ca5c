// SPDX-License-Identifier: Apache-2.0
// The readers of formats, which stored_checkpoint.cpp chooses from: torch.distributed.checkpoint (`.metadata`, a pickle
// that lists tensors, chunks and where they are, and files `__RANK_N.distcp`, in which each chunk is a file of
// torch.save); checkpoints that torch.save wrote, one file or one of each rank; and what Megatron-Core keeps beside the
// tensors of a torch_dist checkpoint: the format and its version in `metadata.json`, and with `verify_integrity` the
// hashes of all files in `integrity.json`.
#pragma once

#include "base/status.h"
#include "checkpoints/stored_checkpoint.h"

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace reshard::checkpoints {

/// Reads a folder with `.metadata` into `checkpoint`: version, tensors and objects.
Status readDcp(const std::string &folder, StoredCheckpoint &checkpoint);

/// Whether a file begins as one of torch.save in the form before PyTorch 1.6, which is no zip and is not read.
bool isLegacyTorchFile(std::string_view file);

/// Whether a folder has files `NAME_rank_R.pt` or `rank_R.pt`.
bool hasTorchRanks(const std::string &folder);

/// Reads a file, or a folder with `model.pt` or with a file of each rank. Of several sets of files, NAME begins with
/// `model`. Errors: a rank without a file; parts of a tensor that are missing or overlap; a tensor that is not
/// distributed and differs between ranks, whose data is compared. Replicas of a distributed tensor are not compared:
/// the part of the lowest rank is taken.
Status readTorchCheckpoint(const std::string &path, StoredCheckpoint &checkpoint);

/// Refuses a `metadata.json` of a format or version that this reader does not know.
Status checkMegatronFormat(const std::string &folder);

/// Refuses an `integrity.json` of another form, that names a file which is not in the folder, or that lacks a file of
/// the checkpoint. Reads no other file. Success if there is none.
Status checkIntegrity(const std::string &folder, const StoredCheckpoint &checkpoint);

/// Compares the files of the folder with their hashes in `integrity.json`, on several threads. An error names a file
/// that differs. The number of files: 0 if there is no `integrity.json`.
Result<size_t> verifyIntegrity(const std::string &folder, unsigned threads,
                               const std::function<void(double)> &progress);

} // namespace reshard::checkpoints
