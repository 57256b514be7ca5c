// SPDX-License-Identifier: Apache-2.0
// Compares target memory with the values that the source sends, by the layouts of the manifest: transfers are not read.
#include "verify/check/check.h"

#include "base/hash.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/check/expected.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace reshard::verify {

using namespace schema;

namespace {

std::string hex(const std::byte *at, int64_t bytes) {
  uint64_t code = 0;
  std::memcpy(&code, at, static_cast<size_t>(bytes));
  return "0x" + hexadecimal(code, static_cast<size_t>(2 * bytes));
}

/// Checks the instances of one mesh rank, one at a time.
class InstanceCheck {
public:
  InstanceCheck(const Plan &plan, const MeshRankMemory &memory, Reference &reference, CopyRoom &room,
                const std::function<void()> &accessed)
      : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(memory.endpoint)), memory_(memory),
        reference_(reference), room_(room), accessed_(accessed) {}

  /// Checks the elements of an instance in place.
  CheckResult elements(const ParamInstance &instance) const {
    const SynthesizedValues values(reference_.conversions(), *endpoint_.params()->Get(instance.param));
    const std::byte *memory = memory_.params[instance.param][instance.instance];
    const int64_t item = itemBytes(values.storageDtype);
    CheckResult result;
    ExpectedTensor tensor(reference_);
    Coverage coverage(instance.bytes / item);
    forEachRange(layoutOf(instance), [&](const ElementRange &range) {
      tensor.select(range);
      coverage.add(range);
      const int64_t wrong = countWrong(memory, range, tensor, values);
      if (wrong > 0 && result.first.empty())
        result.first = describeWrong(instance, *firstWrong(memory, range, tensor, values), tensor, values);
      result.mismatches += static_cast<uint64_t>(wrong);
    });
    result.checkedBytes = static_cast<uint64_t>(instance.bytes);
    result.ambiguity = tensor.ambiguity();
    result.addUncovered(instance, coverage);
    return result;
  }

  /// Checks the params behind a quantized view of elements or plain scales: its base params must hold the quantized
  /// form of the values that the layout says were written to the view.
  CheckResult derived(const ParamInstance &instance) const {
    const Param &param = *endpoint_.params()->Get(instance.param);
    const std::vector<uint32_t> params = baseParams(*param.view());
    CheckResult result;
    ExpectedTensor tensor(reference_);
    const PartsByPlace parts(layoutOf(instance));
    const int64_t item = itemBytes(param.dtype()), elements = instance.bytes / item;
    if (param.view()->kind() == ViewKind::plain_scales) {
      const Bytes values = written(instance, parts, {0, elements}, tensor, result);
      const std::vector<Bytes> expected = writeView(endpoint_, instance.param, memory_.meshRank, values.data(), {});
      compare(instance, params[0], 0, expected[0], result);
    } else {
      QuantizedBands bands(endpoint_, instance.param, memory_.meshRank, tensorScales(instance));
      while (bands.next(std::max(kAtOnce, elements / kMaxBands))) {
        room_.with(static_cast<uint64_t>(bands.count() * (item + 2)), [&] { // values, codes, and bits of the coverage
          const Bytes values = written(instance, parts, {bands.first(), bands.count()}, tensor, result);
          compare(instance, params[0], bands.codesAt(), bands.codes(values.data()), result);
        });
        if (accessed_)
          accessed_();
      }
      compare(instance, params[1], 0, bands.scales(), result);
      if (params.size() > 2)
        compare(instance, params[2], 0, bands.tensorScales(), result);
    }
    result.ambiguity = tensor.ambiguity();
    return result;
  }

private:
  std::string where() const { return endpoint_.role()->str() + " " + meshRankName(endpoint_, memory_.meshRank); }
  std::string nameOf(uint32_t param, uint32_t number) const {
    return instances(plan_.manifest(), endpoint_, param, memory_.meshRank)[number].name;
  }

  InstanceLayout layoutOf(const ParamInstance &instance) const {
    return {plan_.manifest(), endpoint_, memory_.meshRank, instance};
  }

  std::string describeWrong(const ParamInstance &instance, const ElementRange &element, const ExpectedTensor &tensor,
                            const SynthesizedValues &values) const {
    const int64_t item = itemBytes(values.storageDtype);
    const std::byte *found = memory_.params[instance.param][instance.instance] + element.local * item;
    const std::optional<uint64_t> code = element.tensor ? tensor.code(values, element.logical) : 0;
    return where() + " param '" + instance.name + "' element " + std::to_string(element.local) + " (" +
           (element.tensor ? "'" + *element.tensor + "' element " + std::to_string(element.logical)
                           : std::string("padding")) +
           "): found " + hex(found, item) +
           (code ? ", expected " + hex(reinterpret_cast<const std::byte *>(&*code), item)
                 : ", but the source does not hold this element");
  }

  /// A band has so many elements of a view, or more if there would be too many bands: each band visits the ranges of
  /// the parts that it meets.
  static constexpr int64_t kAtOnce = 1 << 18, kMaxBands = 1 << 10;

  /// Compares a part of a base param of a view, from byte `at` on.
  void compare(const ParamInstance &instance, uint32_t param, int64_t at, const Bytes &expected,
               CheckResult &result) const {
    const int64_t item = itemBytes(endpoint_.params()->Get(param)->dtype());
    const std::byte *found = memory_.params[param][instance.instance] + at;
    result.checkedBytes += expected.size();
    if (expected.empty() || std::memcmp(found, expected.data(), expected.size()) == 0)
      return;
    const QuantizedView &view = *endpoint_.params()->Get(instance.param)->view();
    for (int64_t e = 0; e < static_cast<int64_t>(expected.size()) / item; ++e) {
      const std::byte *right = expected.data() + e * item, *is = found + e * item;
      if (std::memcmp(right, is, static_cast<size_t>(item)) == 0)
        continue;
      ++result.mismatches;
      if (result.first.empty())
        result.first = where() + " param '" + nameOf(param, instance.instance) + "' element " +
                       std::to_string(at / item + e) + " (quantized as " + EnumNameQuantization(view.format()) +
                       "): found " + hex(is, item) + ", expected " + hex(right, item);
    }
  }

  /// The values that were written to a part of a view.
  Bytes written(const ParamInstance &instance, const PartsByPlace &parts, Places part, ExpectedTensor &tensor,
                CheckResult &result) const {
    const SynthesizedValues values(reference_.conversions(), *endpoint_.params()->Get(instance.param));
    const int64_t item = itemBytes(values.sentDtype);
    Bytes bytes(static_cast<size_t>(part.count * item)); // padding is zero
    Coverage coverage(part.count);
    parts.forEachRange(part, [&](ElementRange range) {
      tensor.select(range);
      range.local -= part.first;
      coverage.add(range);
      if (range.tensor && !tensor.fromSource())
        return fill(bytes.data(), range, tensor.key(), values);
      const bool contiguous = range.logicalStep == 1 && range.localStep == 1;
      for (int64_t k = 0; range.tensor && k < range.count;) {
        const ElementRange at = range.at(k);
        const ValueSpan sent = tensor.sent(at.logical, contiguous ? range.count - k : 1, item);
        if (sent.data)
          std::memcpy(bytes.data() + at.local * item, sent.data, static_cast<size_t>(sent.count * item));
        else if (result.mismatches += static_cast<uint64_t>(sent.count); result.first.empty())
          result.first = where() + " param '" + instance.name + "': the source does not hold '" + *range.tensor +
                         "' element " + std::to_string(at.logical);
        k += sent.count;
      }
    });
    result.addUncovered(instance, coverage);
    return bytes;
  }

  /// For elements in a format with tensor scales: these, one for each matrix. They follow from the amax of the whole
  /// matrix, of which this instance may hold a part only.
  std::vector<float> tensorScales(const ParamInstance &instance) const {
    const Param &param = *endpoint_.params()->Get(instance.param);
    if (param.view()->kind() != ViewKind::elements || !formatOf(*param.view()).tensorScale())
      return {};
    const SynthesizedValues values(reference_.conversions(), param);
    int64_t matrices = 1;
    for (size_t d = 0; d + 2 < instance.shape.size(); ++d)
      matrices *= instance.shape[d];
    std::vector<float> scales(static_cast<size_t>(matrices));
    for (uint32_t p = 0; p < orEmpty(endpoint_.params()).size(); ++p)
      if (const QuantizedView *view = endpoint_.params()->Get(p)->view();
          view && view->kind() == ViewKind::amax && view->codes() == instance.param) {
        const ParamInstance amax = sibling(endpoint_, instance, p, memory_.meshRank);
        forEachRange(layoutOf(amax), [&](const ElementRange &range) {
          for (int64_t k = 0; range.tensor && k < range.count; ++k) {
            const ElementRange entry = range.at(k);
            float &scale = scales[static_cast<size_t>(entry.local / amax.shape.back())];
            scale = largerAmax(reference_.amax(entry, values).value_or(scale), scale);
          }
        });
      }
    for (float &scale : scales)
      scale = tensorScaleOf(scale);
    return scales;
  }

  const Plan &plan_;
  const Endpoint &endpoint_;
  const MeshRankMemory &memory_;
  Reference &reference_;
  CopyRoom &room_;
  const std::function<void()> &accessed_;
};

CheckResult checkMeshRank(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads,
                          bool viewsOnly, CopyRoom &room, const std::function<void()> &accessed) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
  const std::vector<bool> derived = derivedParams(endpoint);
  const InstanceCheck checks(plan, memory, reference, room, accessed);
  CheckResult result;
  std::mutex mutex;
  forEachInstance(plan, memory, threads, [&](const InstanceLayout &layout) {
    const ParamInstance &instance = layout.instance;
    const bool view = endpoint.params()->Get(instance.param)->view();
    if (derived[instance.param] || (viewsOnly && !view))
      return;
    CheckResult one = view ? checks.derived(instance) : checks.elements(instance);
    const std::lock_guard lock(mutex);
    result.add(std::move(one));
  });
  return result;
}

} // namespace

void CheckResult::add(CheckResult &&part) {
  checkedBytes += part.checkedBytes;
  mismatches += part.mismatches;
  if (first.empty())
    first = std::move(part.first);
  if (ambiguity.empty())
    ambiguity = std::move(part.ambiguity);
}

void CheckResult::addUncovered(const ParamInstance &instance, const Coverage &coverage) {
  const int64_t missing = coverage.missing();
  mismatches += static_cast<uint64_t>(missing);
  if (missing > 0 && first.empty())
    first = "param '" + instance.name + "': " + std::to_string(missing) + " of " + std::to_string(coverage.elements()) +
            " elements are covered by no part of its layout";
}

CheckResult check(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads) {
  Reference reference(plan, seed);
  return check(plan, memory, reference, threads);
}

CheckResult check(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads) {
  CopyRoom room(kMaxCopies);
  return checkMeshRank(plan, memory, reference, threads, false, room, {});
}

CheckResult checkViews(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads,
                       CopyRoom &room, const std::function<void()> &accessed) {
  return checkMeshRank(plan, memory, reference, threads, true, room, accessed);
}

} // namespace reshard::verify
