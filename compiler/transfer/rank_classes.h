// Places that see a part alike: the symmetry that keeps planning independent of the number of replicas.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Places of one endpoint that hold the same elements of a part at the same local positions of equally shaped params.
struct RankClass {
  unsigned param = 0, part = 0;
  std::vector<unsigned> indexMaps; // per dimension of the part: interned logical -> local
  std::vector<int32_t> meshRanks;  // ascending
};

/// Groups places by what they hold, one endpoint at a time.
class RankClasses {
public:
  /// `segments` outlives this; relations of several endpoints may share it.
  RankClasses(const ir::Endpoint &endpoint, Interner<ir::IndexMap> &indexMaps)
      : endpoint_(endpoint), indexMaps_(indexMaps) {}

  /// The views of one part, in the order of their first places; places that hold no element of it are in none.
  std::vector<RankClass> of(unsigned param, unsigned part);

private:
  unsigned number(unsigned sharding, int64_t coordinate);

  const ir::Endpoint &endpoint_;
  Interner<ir::IndexMap> &indexMaps_;
  std::vector<std::vector<int64_t>> numbers_; // per share and coordinate, -1: not yet interned
};

/// Where the instances of each param start among a place's instances, over all params in order.
class InstanceBases {
public:
  explicit InstanceBases(const ir::Endpoint &endpoint);
  uint32_t operator()(int64_t meshRank, unsigned param) const { return bases_[meshRank * params_ + param]; }

private:
  size_t params_;
  std::vector<uint32_t> bases_;
};

} // namespace reshard
