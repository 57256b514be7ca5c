// SPDX-License-Identifier: Apache-2.0
// The memory of the params of a mesh rank, which checks read and synthesis fills.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reshard::verify {

/// The memory of all instances of one mesh rank of one endpoint, by param and instance. Quantized views have none.
/// Params with a transform have memory only where the tools replace the caller.
struct MeshRankMemory {
  uint32_t endpoint = 0, meshRank = 0;
  std::vector<std::vector<std::byte *>> params;
};
using RankMemories = std::vector<MeshRankMemory>;

} // namespace reshard::verify
