// SPDX-License-Identifier: Apache-2.0
// Megatron-Core's shard distribution: the rank that reads or writes each shard of a checkpoint.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <string>
#include <vector>

namespace reshard {

/// One tensor of an overlap, for the ranks of one group.
struct Shard {
  uint32_t overlap = 0, tensor = 0;
  int64_t group = 0;
  bool cross = false;            // the main replica (the lowest rank that holds it) is in another group
  std::vector<int32_t> replicas; // world ranks of the group that hold it, ascending
  int64_t bytes = 0;
  int32_t rank = -1; // the world rank that reads or writes it
};

/// The group of a mesh rank. Mesh ranks that differ only along the axes of `Layout::files.group` are in one group. If
/// that list is empty, all mesh ranks are in group 0.
int64_t groupOf(const ir::Layout &layout, const ir::Endpoint &endpoint, int64_t meshRank);

/// Sorts shards and assigns a rank to each, as Megatron-Core's `distribute_shards_to_ranks` does
/// (core/dist_checkpointing/exchange_utils.py): within each group in the order (main replica in this group first,
/// fewest replicas, most bytes, name), each shard to the replica with the fewest bytes so far; of several, to the
/// lowest rank. Tensors of one pattern are ordered by their index variables.
void assignShards(const ir::Layout &layout, const ir::Transfers &transfers, std::vector<Shard> &shards);

/// All shards between files and ranks, assigned by assignShards. If the source is files, each group reads all shards
/// that it needs; if the target is files, the group of the main replica writes.
std::vector<Shard> megatronDistribution(const ir::Layout &layout, const ir::Transfers &transfers);

/// The bytes that the busiest rank reads or writes under megatronDistribution.
int64_t megatronLoad(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
