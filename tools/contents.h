// What the elements of a plan's buffers are, by the manifest's layouts: the proof compares with it.
#pragma once

#include "schema/manifest.h"
#include "tools/regular_sets.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard::tools {

/// The run of buffers that has a buffer; null: none, which is the arena.
const schema::BufferRange *runOf(const schema::Segment &segment, uint32_t buffer);

/// Remembers as long as memory allows. An element is in one box at most; the tag of a box is the number of the tensor,
/// 0 for padding; its values are positions in the tensor.
class Contents {
public:
  explicit Contents(const schema::Manifest &manifest) : manifest_(manifest) { tensors_[""] = 0; }
  /// The elements of a buffer. Null where they stand in too many pieces.
  std::shared_ptr<const RegularSets> of(const schema::Segment &segment, uint32_t buffer);
  const std::string &name(uint32_t tensor) const;
  const schema::ParamInstance &instance(const schema::BufferRange &run, uint32_t number);

private:
  using Key = std::array<uint32_t, 4>;            // endpoint, place, param, instance
  static constexpr size_t kMaxCached = 1'000'000; // boxes: some 200 MB

  uint32_t representative(const schema::BufferRange &run);
  bool make(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  bool disjoint(const schema::BufferRange &run, uint32_t number, RegularSets &sets);
  uint32_t numberOf(const std::string *tensor);

  const schema::Manifest &manifest_;
  std::unordered_map<std::string, uint32_t> tensors_;
  std::map<Key, std::shared_ptr<const RegularSets>> known_;
  std::map<Key, uint32_t> representatives_; // instance 0
  std::map<std::vector<int64_t>, uint32_t> firstEquivalent_;
  std::unordered_map<uint64_t, std::vector<schema::ParamInstance>> instances_;
  size_t cached_ = 0;
};

} // namespace reshard::tools
