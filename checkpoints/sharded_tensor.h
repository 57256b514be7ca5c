// SPDX-License-Identifier: Apache-2.0
// ShardedTensors, which FSDP1 saves with StateDictType.SHARDED_STATE_DICT: the shard of a rank states its offsets.
#pragma once

#include "checkpoints/distributed_tensor.h"

#include <span>

namespace reshard::analysis {

constexpr std::string_view kShardedTensor = "torch.distributed._shard.sharded_tensor.api ShardedTensor";

std::span<const std::string_view> shardedTensorGlobals();

/// Reads the state of a ShardedTensor, whose shape `found.part` has. Returns an error text, empty on success.
std::string readShardedTensor(const Pickle &pickle, Pickle::Value state, DistributedTensor &found);

} // namespace reshard::analysis
