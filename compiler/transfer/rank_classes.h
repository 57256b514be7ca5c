// SPDX-License-Identifier: Apache-2.0
// Equivalence classes of mesh ranks. Passes plan once for each class, so that their time does not grow with the number
// of replicas.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/copies.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Mesh ranks of one endpoint that hold the same elements of a part at the same local positions of params of equal
/// local shape.
struct PositionClass {
  unsigned param = 0, part = 0;
  ir::IndexMapNumbers indexMaps; // per dimension of the part: interned logical -> local
  ir::MeshRanks meshRanks;       // ascending
};

/// Groups the mesh ranks of copy 0 of one endpoint by the elements that they hold.
class PositionClasses {
public:
  /// `indexMaps` must outlive this object. Several endpoints may share it.
  PositionClasses(const ir::Endpoint &endpoint, const ir::EndpointCopies &copies, Interner<ir::IndexMap> &indexMaps);

  /// The rank classes of one part, in the order of their lowest mesh ranks. Mesh ranks that hold no element of the part
  /// are in no class.
  std::vector<PositionClass> of(unsigned param, unsigned part);

private:
  /// The axes of size > 1 on which the contents of a mesh rank depend.
  std::vector<unsigned> axesOf(const ir::Param &param, const ir::Part &part) const;
  unsigned number(unsigned sharding, int64_t coordinate);

  const ir::Endpoint &endpoint_;
  Interner<ir::IndexMap> &indexMaps_;
  ir::MeshRanks meshRanks_;                   // the mesh ranks of copy 0, ascending
  std::vector<std::vector<int64_t>> numbers_; // by sharding and coordinate; -1: not interned yet
};

/// The number of each param's first instance among all instances of a mesh rank, which are numbered param after param.
class InstanceBases {
public:
  explicit InstanceBases(const ir::Endpoint &endpoint);
  uint32_t operator()(int64_t meshRank, unsigned param) const { return bases_[meshRank * params_ + param]; }

private:
  size_t params_;
  std::vector<uint32_t> bases_;
};

} // namespace reshard
