// Megatron-Core's shard distribution: which rank reads, or writes, which shard of a checkpoint.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <string>
#include <vector>

namespace reshard {

/// A tensor of a tile, as the ranks of one group see it.
struct Shard {
  uint32_t overlap = 0, tensor = 0;
  int64_t group = 0;
  bool cross = false;            // its main replica, on the lowest rank that holds it, is in another group
  std::vector<int32_t> replicas; // world ranks of the group that hold it, ascending
  int64_t bytes = 0;
  int32_t rank = -1; // that reads or writes it
};

/// The group of a place: places that differ along the axes of `Layout::files.group` alone are in one; all are where
/// that is empty.
int64_t groupOf(const ir::Layout &layout, const ir::Endpoint &endpoint, int64_t meshRank);

/// Sorts shards and gives each a rank, as Megatron-Core's `distribute_shards_to_ranks` does
/// (core/dist_checkpointing/exchange_utils.py): group by group, by (main replica elsewhere, fewest replicas, largest,
/// name), each to the holder with least so far, of these the lowest rank. Names are those of tensors, in the order of
/// their indices.
void assignShards(const ir::Layout &layout, const ir::Transfers &transfers, std::vector<Shard> &shards);

/// All shards between files and ranks, so assigned. Reading, every group reads all that it wants; writing, the group of
/// the main replica writes.
std::vector<Shard> megatronDistribution(const ir::Layout &layout, const ir::Transfers &transfers);

/// Bytes of the rank that reads or writes most under that assignment.
int64_t megatronLoad(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
