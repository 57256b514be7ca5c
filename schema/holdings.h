// SPDX-License-Identifier: Apache-2.0
// Who holds which elements of each tensor, by rank class, from the manifest's layouts: one index for digests, proofs,
// checks and reports. The compiler does not use it, so that an error of the planner cannot hide here.
#pragma once

#include "schema/element_ranges.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace reshard::schema {

/// The rank classes of a param.
class RankClasses {
public:
  RankClasses(const Endpoint &endpoint, uint32_t param);

  /// The class of a mesh rank that has the param: mesh ranks with equal numbers hold the same elements.
  uint64_t of(uint64_t meshRank) const {
    uint64_t number = 0;
    for (const Axis &axis : axes_)
      number = number * axis.size + meshRank / axis.stride % axis.size;
    return number;
  }
  /// The mesh ranks that have the param, by class, ascending. Classes are in the order of their first mesh ranks.
  std::vector<std::vector<uint32_t>> meshRanks() const;

private:
  /// An axis on which the layout of the param depends. A mesh rank's coordinate is rank / stride % size.
  struct Axis {
    uint64_t stride, size;
  };

  const Endpoint &endpoint_;
  const Param &param_;
  std::vector<Axis> axes_;
};

/// Mesh ranks of one rank class of a param.
struct RankClass {
  uint32_t param;
  std::vector<uint32_t> meshRanks; // ascending
};

/// The elements of one tensor, or padding, in one part of an instance of a param, on all mesh ranks of a rank class.
struct Holding {
  uint32_t rankClass; // in Holdings::classes
  uint32_t instance;
  uint32_t tensor; // in Holdings::tensors
  PartGrid grid;   // has elements. Its `values` are null
};

/// A tensor of which an endpoint holds elements.
struct HeldTensor {
  const std::string *name; // empty: padding
  std::vector<int64_t> shape;
  int64_t elements = 1;
  std::vector<uint32_t> holdings; // ascending: those of one instance follow each other
};

/// What an endpoint holds: classes by param and first mesh rank, and the holdings of each class by instance and part.
struct Holdings {
  std::vector<RankClass> classes;
  std::vector<Holding> items;
  std::vector<HeldTensor> tensors;        // in the order of their first holdings
  std::map<std::string, uint32_t> byName; // its keys are the names that others point to

  Holdings() = default;
  Holdings(Holdings &&) = default;

  const RankClass &classOf(const Holding &holding) const { return classes[holding.rankClass]; }
  /// The elements of a holding that an earlier one has too, as grids with the places of `holding`.
  std::vector<PartGrid> heldEarlier(const Holding &holding) const;
};

/// The holdings of the params on those mesh ranks for which covers(param, mesh rank) is true, without padding or with.
Holdings holdingsOf(const Manifest &manifest, uint32_t endpoint,
                    const std::function<bool(uint32_t param, uint32_t meshRank)> &covers, bool padding);

/// Whether the memory of a param holds elements of tensors: not if it is transformed, or a quantized view reads or
/// writes it, or it is a view.
inline bool holdsElements(const Param &param) { return bindable(param) && param.parts() && param.parts()->size() > 0; }

} // namespace reshard::schema
