// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/distributed_tensor.h"

namespace reshard::checkpoints {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kLocalShard = "torch.distributed._shard.sharded_tensor.shard Shard";
constexpr std::string_view kShardMetadata = "torch.distributed._shard.metadata ShardMetadata";

constexpr std::string_view kShardedGlobals[] = {
    kShardedTensor,
    kLocalShard,
    kShardMetadata,
    "__builtin__ getattr", // makes the class in the next line
    "torch.distributed._shard.sharded_tensor.api ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.metadata ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharding_spec.api EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec ChunkShardingSpec",
    "torch.distributed.remote_device _remote_device",
};

/// An attribute of an instance with slots, whose state is (None, attributes); null: another form.
const Value *slotOf(const Pickle &pickle, Value object, std::string_view type, std::string_view name) {
  const Value *state = pickle.isObject(object, type) ? pickle.state(object) : nullptr;
  return state && pickle.is(*state, Kind::tuple) && pickle.items(*state).size() == 2
             ? pickle.find(pickle.items(*state)[1], name)
             : nullptr;
}

} // namespace

std::span<const std::string_view> shardedTensorGlobals() { return kShardedGlobals; }

std::string readShardedTensor(const Pickle &pickle, Value state, DistributedTensor &found) {
  // (local shards, metadata, process group, sharding specification, init_rrefs)
  const Pickle::Items items = pickle.items(state);
  if (!pickle.is(state, Kind::tuple) || items.size() != 5 || !pickle.is(items[0], Kind::list))
    return "its state has another form than that of a ShardedTensor of PyTorch 2.13";
  const Pickle::Items shards = pickle.items(items[0]);
  LocalPart &part = found.part;
  if (shards.empty()) {
    for (std::vector<IndexRange> &each : part.positions)
      each.clear();
    return {};
  }
  if (shards.size() > 1)
    return "its rank has " + std::to_string(shards.size()) + " shards of it, expected one";
  const Value *local = slotOf(pickle, shards[0], kLocalShard, "tensor");
  const Value *metadata = slotOf(pickle, shards[0], kLocalShard, "metadata");
  const Value *at = metadata ? slotOf(pickle, *metadata, kShardMetadata, "shard_offsets") : nullptr;
  const Value *lengths = metadata ? slotOf(pickle, *metadata, kShardMetadata, "shard_sizes") : nullptr;
  const auto begins = at ? pickle.integers(*at) : std::nullopt,
             sizes = lengths ? pickle.integers(*lengths) : std::nullopt;
  if (!local || !begins || !sizes || begins->size() != part.shape.size() || sizes->size() != part.shape.size())
    return "its shard has another form than that of PyTorch 2.13";
  for (size_t d = 0; d < part.shape.size(); ++d) {
    const int64_t begin = (*begins)[d], length = (*sizes)[d];
    if (begin < 0 || length < 0 || begin > part.shape[d] || length > part.shape[d] - begin)
      return "its shard has positions " + std::to_string(begin) + " and " + std::to_string(length) +
             " more of dimension " + std::to_string(d) + ", which has " + std::to_string(part.shape[d]);
    part.positions[d].clear();
    if (length > 0)
      part.positions[d].push_back({begin, length});
  }
  found.local = *local;
  return {};
}

} // namespace reshard::checkpoints
