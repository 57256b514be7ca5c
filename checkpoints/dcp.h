// SPDX-License-Identifier: Apache-2.0
// Checkpoints of torch.distributed.checkpoint: `.metadata`, a pickle that lists tensors, chunks and where they are, and
// files `__RANK_N.distcp`. Each chunk is a file of torch.save within such a file.
#pragma once

#include "checkpoints/stored_checkpoint.h"

namespace reshard::analysis {

/// Reads a folder with `.metadata` into `checkpoint`: version, tensors and objects.
Status readDcp(const std::string &folder, StoredCheckpoint &checkpoint);

} // namespace reshard::analysis
