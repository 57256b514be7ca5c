// SPDX-License-Identifier: Apache-2.0
// Which tensor elements each buffer of a plan holds, according to the manifest's layouts. The plan verifier compares
// the moves with this.
#pragma once

#include "analysis/verify/regular_sets.h"
#include "schema/manifest.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard::analysis {

/// The range of buffers that contains a buffer; null for the arena.
const schema::BufferRange *bufferRangeOf(const schema::Segment &segment, uint32_t buffer);

/// The contents of buffers, cached. The sets of one buffer are disjoint. The tag of a set is the number of its tensor
/// (0: padding); its values are row-major positions in the tensor.
class Contents {
public:
  explicit Contents(const schema::Manifest &manifest) : manifest_(manifest) { tensors_[""] = 0; }
  /// The elements of a buffer; null if they do not fit in RegularSets::kMaxSets sets.
  std::shared_ptr<const RegularSets> of(const schema::Segment &segment, uint32_t buffer);
  /// The number, at least 1, of a range's endpoint, param and rank class: equal numbers mean equal elements.
  uint64_t number(const schema::BufferRange &run);
  const std::string &name(uint32_t tensor) const;
  const schema::ParamInstance &instance(const schema::BufferRange &run, uint32_t number);

private:
  using Key = std::array<uint32_t, 4>;            // endpoint, mesh rank, param, instance
  static constexpr size_t kMaxCached = 1'000'000; // sets: about 200 MB

  uint32_t representative(const schema::BufferRange &run);
  bool make(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  bool disjoint(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  uint32_t numberOf(const std::string *tensor);

  const schema::Manifest &manifest_;
  std::unordered_map<std::string, uint32_t> tensors_;
  std::map<Key, std::shared_ptr<const RegularSets>> known_;
  std::map<Key, uint64_t> numbers_;         // instance 0
  std::map<Key, uint32_t> representatives_; // instance 0
  std::map<std::vector<int64_t>, uint32_t> firstEquivalent_;
  std::unordered_map<uint64_t, std::vector<schema::ParamInstance>> instances_;
  size_t cached_ = 0;
};

} // namespace reshard::analysis
