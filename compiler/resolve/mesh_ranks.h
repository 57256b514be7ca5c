// Places of an endpoint by their coordinates: what depends on some axes alone is looked at once for each combination of
// them.
#pragma once

#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// One place, the first, for each combination of coordinates on `axes` that places have; ascending.
std::vector<int64_t> distinctMeshRanks(const ir::Endpoint &endpoint, std::vector<unsigned> axes);

/// Whether every combination of coordinates on `axes` occurs: no axis of one view divides up another of a different
/// view.
bool independent(const ir::Endpoint &endpoint, std::vector<unsigned> axes);

/// "rank 12", for storage "file 12".
std::string meshRankText(const ir::Endpoint &endpoint, int64_t meshRank);

} // namespace reshard
