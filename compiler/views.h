// Places that see a part alike: the symmetry that keeps planning independent of the number of replicas.
#pragma once

#include "compiler/interner.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Places of one endpoint that hold the same elements of a part at the same local positions of equally shaped params.
struct View {
  unsigned param = 0, part = 0;
  std::vector<unsigned> segments; // per dimension of the part: interned logical -> local
  std::vector<int32_t> places;    // ascending
};

/// Groups places by what they hold, one endpoint at a time.
class Views {
public:
  /// `segments` outlives this; relations of several endpoints may share it.
  Views(const ir::Endpoint &endpoint, Interner<ir::Segments> &segments) : endpoint_(endpoint), segments_(segments) {}

  /// The views of one part, in the order of their first places; places that hold no element of it are in none.
  std::vector<View> of(unsigned param, unsigned part);

private:
  unsigned number(unsigned share, int64_t coordinate);

  const ir::Endpoint &endpoint_;
  Interner<ir::Segments> &segments_;
  std::vector<std::vector<int64_t>> numbers_; // per share and coordinate, -1: not yet interned
};

/// Where the instances of each param start among a place's instances, over all params in order.
class InstanceBases {
public:
  explicit InstanceBases(const ir::Endpoint &endpoint);
  uint32_t operator()(int64_t place, unsigned param) const { return bases_[place * params_ + param]; }

private:
  size_t params_;
  std::vector<uint32_t> bases_;
};

} // namespace reshard
