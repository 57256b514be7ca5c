// SPDX-License-Identifier: Apache-2.0
// Creates checkpoints of torch.distributed.checkpoint, and of Megatron-Core, with one chunk for each tensor.
#pragma once

#include "analysis/files/safetensors.h"

#include <string>
#include <vector>

namespace reshard::analysis {

/// Creates `.metadata` and files `__0_N.distcp` of at most `fileBytes`, or of one tensor, and maps them for writing;
/// the data is zero.
Status createDcp(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                 Checkpoint &checkpoint);

/// The file of Megatron-Core's common state: what is no tensor.
constexpr const char *kMegatronCommon = "common.pt";

/// The same, with the two further files of Megatron-Core's torch_dist: `metadata.json`, which names the format, and
/// `common.pt`, whose common state is empty.
Status createMegatron(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                      Checkpoint &checkpoint);

} // namespace reshard::analysis
