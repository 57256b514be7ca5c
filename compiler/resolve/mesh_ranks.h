// SPDX-License-Identifier: Apache-2.0
// The mesh ranks of an endpoint by their coordinates: properties that depend on some axes only are computed once for
// each combination of coordinates on them.
#pragma once

#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// The first mesh rank for each combination of coordinates on `axes` that occurs; ascending.
std::vector<int64_t> distinctMeshRanks(const ir::Endpoint &endpoint, std::vector<unsigned> axes);

/// Whether every combination of coordinates on `axes` occurs: no two of them are of different views and depend on each
/// other.
bool independent(const ir::Endpoint &endpoint, std::vector<unsigned> axes);

/// "rank 12" (the world rank), for storage "file 12", or "stored chunk 12" in formats with chunks.
std::string meshRankText(const ir::Endpoint &endpoint, int64_t meshRank);

} // namespace reshard
