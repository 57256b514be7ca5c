// Where a world rank is in each endpoint of a plan.
#pragma once

#include "schema/manifest.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace reshard {

/// An index over `Endpoint.ranks` of a manifest that has passed checkManifest. Time and memory are linear in the
/// manifest, a lookup is logarithmic: without it, loading all segments of a plan takes time quadratic in its ranks.
class MeshRankIndex {
public:
  explicit MeshRankIndex(const schema::Manifest &manifest);

  /// The place of an endpoint that is a world rank, or of a storage endpoint a file number; nothing where there is
  /// none.
  std::optional<uint32_t> find(uint32_t endpoint, uint32_t rank) const;

private:
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> meshRanks_; // by endpoint: (rank, place), sorted
};

} // namespace reshard
