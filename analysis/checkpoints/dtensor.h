// SPDX-License-Identifier: Apache-2.0
// DTensors in files of torch.save: the part of a tensor that one rank saved, from its device mesh and placements.
#pragma once

#include "analysis/checkpoints/pickle.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::analysis {

/// Consecutive positions of a dimension.
struct Interval {
  int64_t begin = 0, length = 0;
};

/// What a rank holds of a tensor: of each dimension, the positions in the order of its local ones.
struct LocalPart {
  std::vector<int64_t> shape; // of the whole tensor
  std::vector<std::vector<Interval>> positions;
  /// Of the local tensor.
  std::vector<int64_t> localShape() const;
};

/// The classes and functions that a saved DTensor needs.
std::span<const std::string_view> dtensorGlobals();

/// Whether a value of a pickle is a DTensor, or another tensor of a class of its own.
bool isDTensor(const Pickle &pickle, Pickle::Value value);

/// Reads a DTensor. `local`: the value of its local tensor. Returns an error text, empty on success: placements that
/// are neither Shard nor Replicate nor _StridedShard, or values of another form.
std::string readDTensor(const Pickle &pickle, Pickle::Value value, Pickle::Value &local, LocalPart &part);

} // namespace reshard::analysis
