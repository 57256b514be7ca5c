// SPDX-License-Identifier: Apache-2.0
// Maps a world rank to its mesh rank in each endpoint of a plan.
#pragma once

#include "schema/manifest.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace reshard {

/// An index of `Endpoint.ranks` of a manifest that has passed checkManifest. Time and memory are linear in the manifest
/// (times a logarithm for the sort), a lookup is logarithmic: without the index, loading all segments of a plan takes
/// time quadratic in its ranks.
class MeshRankIndex {
public:
  explicit MeshRankIndex(const schema::Manifest &manifest);

  /// The mesh rank of a world rank, or for a storage endpoint of a file number; no value if the endpoint does not have
  /// it.
  std::optional<uint32_t> find(uint32_t endpoint, uint32_t rank) const;

private:
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> meshRanks_; // by endpoint: (rank, mesh rank), sorted
};

} // namespace reshard
