// SPDX-License-Identifier: Apache-2.0
// Creates checkpoints of torch.distributed.checkpoint with one chunk for each tensor.
#pragma once

#include "analysis/files/safetensors.h"

#include <string>
#include <vector>

namespace reshard::analysis {

/// Creates `.metadata` and files `__0_N.distcp` of at most `fileBytes`, or of one tensor, and maps them for writing;
/// the data is zero.
Status createDcp(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                 Checkpoint &checkpoint);

} // namespace reshard::analysis
