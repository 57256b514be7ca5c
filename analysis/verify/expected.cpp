// SPDX-License-Identifier: Apache-2.0
#include "analysis/verify/expected.h"

#include <cstring>

namespace reshard::analysis {

using namespace schema;

namespace {

template <class Element> int64_t countWrong(const std::byte *memory, const ElementRange &range, uint64_t key) {
  const auto *in = reinterpret_cast<const Element *>(memory) + range.local;
  int64_t wrong = 0;
  for (int64_t k = 0; k < range.count; ++k)
    wrong += in[k * range.localStep] !=
             static_cast<Element>(elementHash(key, static_cast<uint64_t>(range.logical + k * range.logicalStep)));
  return wrong;
}

} // namespace

ExpectedTensor::ExpectedTensor(std::string name, std::shared_ptr<const TensorValues> values)
    : name_(std::move(name)), sourceValues_(std::move(values)) {
  checkConflict();
}

void ExpectedTensor::select(const ElementRange &range) {
  if (!range.tensor || name_ == *range.tensor)
    return;
  name_ = *range.tensor;
  sourceValues_.reset();
  if (reference_->synthesized() && !reference_->viewed(range.pattern))
    key_ = tensorKey(name_, reference_->seed());
  else
    sourceValues_ = reference_->tensor(name_);
  checkConflict();
}

void ExpectedTensor::checkConflict() {
  if (sourceValues_ && sourceValues_->conflict() >= 0 && ambiguity_.empty())
    ambiguity_ = "source params that hold tensor '" + name_ + "' give two different values for element " +
                 std::to_string(sourceValues_->conflict()) +
                 ", because they quantize it in different blocks, and the layouts do not decide which value is sent";
}

std::optional<uint64_t> ExpectedTensor::code(const SynthesizedValues &values, int64_t element) const {
  if (!sourceValues_)
    return values(key_, static_cast<uint64_t>(element));
  uint64_t code = 0;
  const int64_t item = itemBytes(values.sentDtype);
  const std::byte *found = sent(element, item);
  if (!found)
    return std::nullopt;
  std::memcpy(&code, found, static_cast<size_t>(item));
  return values.sentDtype == values.storageDtype ? code : castCode(*values.param, code);
}

int64_t countWrong(const std::byte *memory, const ElementRange &range, const ExpectedTensor &tensor,
                   const SynthesizedValues &values) {
  const DType type = values.storageDtype;
  const int64_t item = itemBytes(type);
  if (!range.tensor || type == DType::boolean || tensor.fromSource() || !values.plain()) {
    int64_t count = 0;
    for (int64_t k = 0; k < range.count; ++k) {
      const std::optional<uint64_t> code =
          range.tensor ? tensor.code(values, range.logical + k * range.logicalStep) : 0;
      count += !code || std::memcmp(memory + (range.local + k * range.localStep) * item, &*code,
                                    static_cast<size_t>(item)) != 0; // little-endian
    }
    return count;
  }
  switch (item) {
  case 1:
    return countWrong<uint8_t>(memory, range, tensor.key());
  case 2:
    return countWrong<uint16_t>(memory, range, tensor.key());
  case 4:
    return countWrong<uint32_t>(memory, range, tensor.key());
  default:
    return countWrong<uint64_t>(memory, range, tensor.key());
  }
}

std::optional<ElementRange> firstWrong(const std::byte *memory, const ElementRange &range, const ExpectedTensor &tensor,
                                       const SynthesizedValues &values) {
  for (int64_t k = 0; k < range.count; ++k)
    if (countWrong(memory, range.at(k), tensor, values) > 0)
      return range.at(k);
  return std::nullopt;
}

} // namespace reshard::analysis
