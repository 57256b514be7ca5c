// SPDX-License-Identifier: Apache-2.0
// The values that target elements must have.
#pragma once

#include "verify/check/reference.h"
#include "verify/check/synthesize.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace reshard::verify {

/// The expected values of one tensor: computed from its key if they are synthesized, else read from the source.
class ExpectedTensor {
public:
  /// Selects tensors in a reference.
  explicit ExpectedTensor(Reference &reference) : reference_(&reference) {}
  /// A tensor that was assembled from the source.
  ExpectedTensor(std::string name, std::shared_ptr<const TensorValues> values);

  /// Selects the tensor of a range; padding selects none.
  void select(const schema::ElementRange &range);
  bool fromSource() const { return sourceValues_ != nullptr; }
  uint64_t key() const { return key_; }
  /// Why the values of a tensor that was selected are unknown; empty if they are known.
  const std::string &ambiguity() const { return ambiguity_; }

  /// Elements as they are sent, of a tensor that is read from the source. As TensorValues::stretch; `item`: bytes of an
  /// element.
  ValueSpan sent(int64_t element, int64_t most, int64_t item) const { return sourceValues_->span(element, most, item); }
  /// An element as the target param stores it; empty if the source does not hold it.
  std::optional<uint64_t> code(const SynthesizedValues &values, int64_t element) const;

private:
  void checkConflict();

  Reference *reference_ = nullptr;
  std::string name_, ambiguity_;
  uint64_t key_ = 0;
  std::shared_ptr<const TensorValues> sourceValues_;
};

/// The number of elements of a range that differ from the expected ones. `values`: of the param.
int64_t countWrong(const std::byte *memory, const schema::ElementRange &range, const ExpectedTensor &tensor,
                   const SynthesizedValues &values);

/// The first of them; empty if there is none.
std::optional<schema::ElementRange> firstWrong(const std::byte *memory, const schema::ElementRange &range,
                                               const ExpectedTensor &tensor, const SynthesizedValues &values);

} // namespace reshard::verify
