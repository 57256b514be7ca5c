// SPDX-License-Identifier: Apache-2.0
// Which tensor elements each buffer of a plan holds, according to the manifest's layouts. The plan verifier compares
// the moves with this.
#pragma once

#include "analysis/verify/regular_sets.h"
#include "schema/manifest.h"

#include <compare>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard::analysis {

/// The range of buffers that contains a buffer; null for the arena.
const schema::BufferRange *bufferRangeOf(const schema::Segment &segment, uint32_t buffer);

/// The elements that a range of buffers holds: equal numbers mean equal elements.
struct ContentNumber {
  uint64_t param; // of all endpoints, from 1
  uint64_t rankClass;
  auto operator<=>(const ContentNumber &) const = default;
};

/// The contents of buffers, cached. The sets of one buffer are disjoint. The tag of a set is the number of its tensor
/// (0: padding); its values are row-major positions in the tensor.
class Contents {
public:
  explicit Contents(const schema::Manifest &manifest);
  /// The elements of a buffer; null if they do not fit in RegularSets::kMaxSets sets. A buffer that is asked for again
  /// and again, but not later, needs no place in the cache: only the last one that is not to be `kept` is known.
  std::shared_ptr<const RegularSets> of(const schema::Segment &segment, uint32_t buffer, bool kept = true);
  ContentNumber number(const schema::BufferRange &run) const;
  const std::string &name(uint32_t tensor) const;
  const schema::ParamInstance &instance(const schema::BufferRange &run, uint32_t number);

private:
  /// One instance of a range of buffers.
  struct Key {
    ContentNumber content;
    uint64_t instance;
    bool operator==(const Key &) const = default;
  };
  struct Hash {
    size_t operator()(const Key &key) const;
  };
  /// An axis on which the elements of a param depend. A mesh rank's coordinate is rank / stride % size.
  struct Axis {
    uint64_t stride, size;
  };
  static constexpr size_t kMaxCached = 1'000'000; // sets: about 200 MB

  schema::ParamInstance layoutOf(const schema::BufferRange &run, uint32_t number) const;
  bool make(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  bool disjoint(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  uint32_t numberOf(const std::string *tensor);

  const schema::Manifest &manifest_;
  std::unordered_map<std::string, uint32_t> tensors_;
  std::unordered_map<Key, std::shared_ptr<const RegularSets>, Hash> known_;
  std::vector<size_t> firstParams_;     // by endpoint: the number of its first param
  std::vector<std::vector<Axis>> axes_; // by param of all endpoints
  std::unordered_map<uint64_t, std::vector<schema::ParamInstance>> instances_;
  size_t cached_ = 0;
  Key lastKey_{};
  std::shared_ptr<const RegularSets> last_; // that is not kept
};

} // namespace reshard::analysis
