// SPDX-License-Identifier: Apache-2.0
// What Megatron-Core keeps beside the tensors of a torch_dist checkpoint: the format and its version in
// `metadata.json`, and with `verify_integrity` the hashes of all files in `integrity.json`.
#pragma once

#include "base/status.h"
#include "checkpoints/stored_checkpoint.h"

#include <cstddef>
#include <functional>
#include <string>

namespace reshard::analysis {

/// Refuses a `metadata.json` of a format or version that this reader does not know.
Status checkMegatronFormat(const std::string &folder);

/// Refuses an `integrity.json` of another form, that names a file which is not in the folder, or that lacks a file of
/// the checkpoint. Reads no other file. Success if there is none.
Status checkIntegrity(const std::string &folder, const StoredCheckpoint &checkpoint);

/// Compares the files of the folder with their hashes in `integrity.json`, on several threads. An error names a file
/// that differs. The number of files: 0 if there is no `integrity.json`.
Result<size_t> verifyIntegrity(const std::string &folder, unsigned threads,
                               const std::function<void(double)> &progress);

} // namespace reshard::analysis
