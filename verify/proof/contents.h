// SPDX-License-Identifier: Apache-2.0
// Which tensor elements each buffer of a plan holds, according to the manifest's layouts. The plan verifier compares
// the moves with this. It is no index by tensor (schema/holdings.h), which would list every element of the model before
// the first step is read: a proof goes from buffers to elements, makes what it meets, and makes it once for all layers
// and rank classes of one form.
#pragma once

#include "schema/holdings.h"
#include "schema/manifest.h"
#include "verify/proof/regular_sets.h"

#include <compare>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard::verify {

/// The range of buffers that contains a buffer; null for the arena.
const schema::BufferRange *bufferRangeOf(const schema::Segment &segment, uint32_t buffer);

/// The elements that a range of buffers holds: equal numbers mean equal elements.
struct ContentNumber {
  uint64_t param; // from 1, over all endpoints
  uint64_t rankClass;
  auto operator<=>(const ContentNumber &) const = default;
};

/// The key of a cache.
using Words = std::vector<uint64_t>;
struct WordsHash {
  size_t operator()(const Words &words) const;
};

/// A tensor: its pattern, and a number for the values of the pattern's index variables.
struct TensorNumber {
  uint32_t pattern;
  uint64_t values;
  auto operator<=>(const TensorNumber &) const = default;
};

/// What buffers have in common that differ only in the tensors that they hold, like those of two layers.
struct ContentForm {
  /// A tensor of a part, counted from the first one that the buffer may hold of it.
  struct Tag {
    uint32_t part;
    uint64_t values;
  };
  uint32_t number;       // from 1; no other form has it
  bool ownForm = false;  // parts overlap, so each instance has a form of its own. This one has nothing else
  RegularSets sets;      // disjoint; their values are row-major positions in the tensors
  std::vector<Tag> tags; // by tag of the sets. Tag 0 is padding
};

/// The elements of one buffer.
class BufferContents {
public:
  BufferContents() = default;
  BufferContents(const BufferContents &) = delete;
  BufferContents &operator=(const BufferContents &) = delete;

  const RegularSets &sets() const { return form_->sets; }
  /// Equal numbers mean equal sets, and equal meanings of their tags.
  uint32_t form() const { return form_->number; }
  /// The tensor of a tag, which is not 0.
  TensorNumber tensor(uint32_t tag) const {
    const ContentForm::Tag &held = form_->tags[tag];
    return {first_[held.part].pattern, first_[held.part].values + held.values};
  }

private:
  friend class Contents;
  const schema::BufferRange *range_ = nullptr; // null: none
  uint32_t instance_ = 0;
  std::shared_ptr<const ContentForm> form_;
  std::span<const TensorNumber> first_; // by part: the first tensor that the buffer may hold of it
  std::vector<TensorNumber> own_;       // first_, if it depends on the instance
};

/// The contents of buffers. Their forms are cached.
class Contents {
public:
  explicit Contents(const schema::Manifest &manifest);
  /// Sets `to` to the elements of a buffer. Returns false if they do not fit in RegularSets::kMaxSets sets or their
  /// tensors have no number. `to` may be used again, which is faster for the same buffer; the segment must stay.
  bool of(const schema::Segment &segment, uint32_t buffer, BufferContents &to);
  ContentNumber number(const schema::BufferRange &run) const;
  std::string name(const TensorNumber &tensor) const;
  const schema::ParamInstance &instance(const schema::BufferRange &run, uint32_t number);

private:
  /// An index variable of a part that is in the param's name, so that each instance has one value of it.
  struct Named {
    uint32_t part, sharding, variable; // variable: of the param
    uint64_t stride;                   // the variable's, in TensorNumber::values
  };
  struct Layout {
    schema::RankClasses classes;
    std::vector<TensorNumber> first; // by part, for an instance whose values are all 0
    std::vector<Named> named;
    bool numbered; // all tensors have a number
  };
  static constexpr size_t kMaxCached = 1'000'000; // sets: about 200 MB

  Layout layoutOf(const schema::Endpoint &endpoint, uint32_t param) const;
  void addTensors(const schema::Param &param, const schema::Part &part, Layout &layout) const;
  const Layout &layoutOf(const schema::BufferRange &run) const {
    return layouts_[firstParams_[run.endpoint()] + run.param()];
  }
  void readValues(const schema::BufferRange &run, uint32_t number);
  std::shared_ptr<const ContentForm> formOf(const schema::BufferRange &run, const BufferContents &of, bool own);
  void forEachTagged(const schema::BufferRange &run, const BufferContents &of, ContentForm &form,
                     const std::function<void(uint32_t, const schema::PartGrid &)> &visit);
  bool make(const schema::BufferRange &run, const BufferContents &of, bool own, ContentForm &form);
  bool disjoint(const schema::BufferRange &run, const BufferContents &of, ContentForm &form);

  const schema::Manifest &manifest_;
  std::vector<std::vector<uint64_t>> strides_; // by pattern and variable; none for a pattern without numbers
  std::vector<size_t> firstParams_;            // by endpoint: the number of its first param
  std::vector<Layout> layouts_;                // by param of all endpoints
  std::unordered_map<Words, std::shared_ptr<const ContentForm>, WordsHash> forms_;
  std::unordered_map<uint64_t, std::vector<schema::ParamInstance>> instances_;
  size_t cached_ = 0;
  uint32_t made_ = 0;           // forms
  Words key_;                   // for the form that is looked up
  std::vector<int64_t> values_; // what readValues() reads
};

} // namespace reshard::verify
