// SPDX-License-Identifier: Apache-2.0
// Which mesh ranks of an endpoint hold which elements of each tensor, from the manifest's layouts.
#pragma once

#include "schema/element_ranges.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {

/// The elements of one tensor in one instance of a param, on all mesh ranks of a rank class.
struct Holding {
  uint32_t rankClass; // in Holdings::classes
  uint32_t instance;
  uint32_t tensor;       // in Holdings::tensors
  schema::PartGrid grid; // its `tensor` and `values` are null
};

/// The mesh ranks that hold the same elements of a param.
struct HoldingClass {
  uint32_t param;
  std::vector<uint32_t> meshRanks; // ascending
};

/// A tensor of which an endpoint holds elements.
struct HeldTensor {
  std::string name;
  uint32_t pattern;
  std::vector<int64_t> shape;
  int64_t elements;
  std::vector<uint32_t> holdings; // ascending
};

struct Holdings {
  std::vector<HoldingClass> classes;
  std::vector<Holding> items;
  std::vector<HeldTensor> tensors;
  std::map<std::string, uint32_t> byName;
  /// The params whose memory does not hold elements of tensors: transformed ones, and those that quantized views read
  /// or write.
  std::vector<uint32_t> undigested;

  /// The elements of a holding that an earlier one has too, as grids with the places of `holding`.
  std::vector<schema::PartGrid> heldEarlier(const Holding &holding) const;
};

Holdings holdingsOf(const schema::Manifest &manifest, uint32_t endpoint);

} // namespace reshard
