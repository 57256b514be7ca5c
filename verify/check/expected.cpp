// SPDX-License-Identifier: Apache-2.0
#include "verify/check/expected.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace reshard::verify {

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

/// Counts the elements of `found`, each `step` elements behind the one before, that differ from those of `expected`.
int64_t countDifferent(const std::byte *found, int64_t step, const std::byte *expected, int64_t count, int64_t item) {
  if (step == 1 && std::memcmp(found, expected, static_cast<size_t>(count * item)) == 0)
    return 0;
  int64_t different = 0;
  for (int64_t k = 0; k < count; ++k)
    different += std::memcmp(found + k * step * item, expected + k * item, static_cast<size_t>(item)) != 0;
  return different;
}

/// Counts the elements [from, from + sent.count) of a range that differ from those that the source sends.
int64_t countWrong(const std::byte *memory, const ElementRange &range, int64_t from, const ValueSpan &sent,
                   const SynthesizedValues &values) {
  const int64_t item = itemBytes(values.storageDtype), sentItem = itemBytes(values.sentDtype), step = range.localStep;
  const std::byte *found = memory + (range.local + from * step) * item;
  if (values.sentDtype == values.storageDtype)
    return countDifferent(found, step, sent.data, sent.count, item);
  constexpr int64_t kAtOnce = 1024;
  std::array<std::byte, kAtOnce * sizeof(uint64_t)> stored; // not initialized: it may be for one element only
  int64_t wrong = 0;
  for (int64_t first = 0, count = 0; first < sent.count; first += count) {
    count = std::min(sent.count - first, kAtOnce);
    values.cast(sent.data + first * sentItem, stored.data(), count);
    wrong += values.countBeyond(sent.data + first * sentItem, count);
    wrong += countDifferent(found + first * step * item, step, stored.data(), count, item);
  }
  return wrong;
}

/// The elements of a range that differ from those that the source holds.
int64_t countUnlikeSource(const std::byte *memory, const ElementRange &range, const ExpectedTensor &tensor,
                          const SynthesizedValues &values) {
  int64_t wrong = 0;
  for (int64_t k = 0; k < range.count;) {
    const ValueSpan sent = tensor.sent(range.logical + k * range.logicalStep,
                                       range.logicalStep == 1 ? range.count - k : 1, itemBytes(values.sentDtype));
    wrong += sent.data ? countWrong(memory, range, k, sent, values) : sent.count;
    k += sent.count;
  }
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
    ambiguity_ =
        "source params that hold tensor '" + name_ + "' give two different values for element " +
        std::to_string(sourceValues_->conflict()) +
        ": they quantize it in different formats or blocks, or the source's values differ, and the layouts do not "
        "decide which value is sent";
}

std::optional<uint64_t> ExpectedTensor::code(const SynthesizedValues &values, int64_t element) const {
  if (!sourceValues_)
    return values(key_, static_cast<uint64_t>(element));
  uint64_t code = 0;
  const int64_t item = itemBytes(values.sentDtype);
  const ValueSpan found = sent(element, 1, item);
  if (!found.data)
    return std::nullopt;
  std::memcpy(&code, found.data, static_cast<size_t>(item));
  return values.sentDtype == values.storageDtype ? code : values.cast(code);
}

int64_t countWrong(const std::byte *memory, const ElementRange &range, const ExpectedTensor &tensor,
                   const SynthesizedValues &values) {
  const DType type = values.storageDtype;
  const int64_t item = itemBytes(type);
  if (range.tensor && tensor.fromSource())
    return countUnlikeSource(memory, range, tensor, values);
  if (!range.tensor || type == DType::boolean || !values.plain()) {
    int64_t count = 0;
    for (int64_t k = 0; k < range.count; ++k) {
      const uint64_t code =
          range.tensor ? values(tensor.key(), static_cast<uint64_t>(range.logical + k * range.logicalStep)) : 0;
      count += std::memcmp(memory + (range.local + k * range.localStep) * item, &code, static_cast<size_t>(item)) !=
               0; // little-endian
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

} // namespace reshard::verify
