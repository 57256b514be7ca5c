// SPDX-License-Identifier: Apache-2.0
// Distributed tensors in files of torch.save: the part of a tensor that one rank saved. A DTensor states it by its
// device mesh and placements, a ShardedTensor by the offsets of its shard.
#pragma once

#include "checkpoints/pickle.h"
#include "checkpoints/read_budget.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::checkpoints {

/// Consecutive positions of a dimension.
struct IndexRange {
  int64_t begin = 0, length = 0;
};

/// What a rank holds of a tensor: of each dimension, the positions in the order of its local ones.
struct LocalPart {
  std::vector<int64_t> shape; // the shape of the whole tensor
  std::vector<std::vector<IndexRange>> positions;
  /// The shape of the local tensor.
  std::vector<int64_t> localShape() const;
};

/// A distributed tensor as its pickle states it.
struct DistributedTensor {
  std::string_view dtype;             // the global of its dtype
  std::optional<Pickle::Value> local; // its local tensor; none: the rank has no part of a ShardedTensor
  LocalPart part;
};

/// The classes and functions that saved distributed tensors need.
std::vector<std::string_view> distributedGlobals();

/// The function that rebuilds tensors of a class of their own, and plain tensors with attributes.
constexpr std::string_view kRebuildFromType = "torch._tensor _rebuild_from_type_v2";

/// Whether the state of a tensor sets attributes alone: none that replaces elements, as `data` does. Of a tensor with
/// slots it is (attributes, slots).
bool onlyDescribes(const Pickle &pickle, Pickle::Value state);

/// Whether a value of a pickle is a tensor of a class of its own.
bool isDistributed(const Pickle &pickle, Pickle::Value value);

/// Reads a DTensor or a ShardedTensor. Returns an error text, empty on success: another class, placements that are
/// neither Shard nor Replicate nor _StridedShard, several shards of a rank, or values of another form.
std::string readDistributed(const Pickle &pickle, Pickle::Value value, DistributedTensor &found, ReadBudget &budget);

constexpr std::string_view kDTensor = "torch.distributed.tensor DTensor";

std::span<const std::string_view> dtensorGlobals();

/// Reads the state of a DTensor, whose shape `found.part` has. Returns an error text, empty on success.
std::string readDTensor(const Pickle &pickle, Pickle::Value state, DistributedTensor &found, ReadBudget &budget);

constexpr std::string_view kShardedTensor = "torch.distributed._shard.sharded_tensor.api ShardedTensor";

std::span<const std::string_view> shardedTensorGlobals();

/// Reads the state of a ShardedTensor, whose shape `found.part` has. Returns an error text, empty on success.
std::string readShardedTensor(const Pickle &pickle, Pickle::Value state, DistributedTensor &found);

} // namespace reshard::checkpoints
