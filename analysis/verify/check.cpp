// Checks the memory of one target mesh rank against its layout, element by element.

#include "analysis/flatbuffer_vectors.h"
#include "analysis/verify/reference.h"
#include "analysis/verify/synthesized_values.h"

#include <cstdio>
#include <cstring>
#include <mutex>

namespace reshard::analysis {

using namespace schema;

namespace {

/// The expected values of one tensor: computed from its key if they are synthesized, else read from the source.
class ExpectedTensor {
public:
  explicit ExpectedTensor(Reference &reference) : reference_(reference) {}

  /// Selects the tensor of a run.
  void select(const ElementRun &run) {
    if (!run.tensor || name_ == *run.tensor)
      return;
    name_ = *run.tensor;
    sourceValues_.reset();
    if (reference_.synthesized() && !reference_.viewed(run.pattern))
      key_ = tensorKey(name_, reference_.seed());
    else
      sourceValues_ = reference_.tensor(name_);
    if (sourceValues_ && sourceValues_->conflict() >= 0 && ambiguity_.empty())
      ambiguity_ = "source params that hold tensor '" + name_ + "' give two different values for element " +
                   std::to_string(sourceValues_->conflict()) +
                   ", because they quantize it in different blocks, and the layouts do not decide which value is sent";
  }
  bool fromSource() const { return sourceValues_ != nullptr; }
  uint64_t key() const { return key_; }
  const std::string &ambiguity() const { return ambiguity_; }

  /// An element as it is sent; null if the source does not hold it.
  const std::byte *at(int64_t element, int64_t item) const {
    return sourceValues_->known(element) ? sourceValues_->at(element, item) : nullptr;
  }

  /// An element as the target param stores it; empty if the source does not hold it.
  std::optional<uint64_t> code(const SynthesizedValues &values, int64_t element) const {
    if (!sourceValues_)
      return values(key_, static_cast<uint64_t>(element));
    uint64_t code = 0;
    const int64_t item = itemBytes(values.sentDtype);
    const std::byte *found = at(element, item);
    if (!found)
      return std::nullopt;
    std::memcpy(&code, found, static_cast<size_t>(item));
    return values.sentDtype == values.storageDtype ? code : castCode(*values.param, code);
  }

private:
  Reference &reference_;
  std::string name_, ambiguity_;
  uint64_t key_ = 0;
  std::shared_ptr<const TensorValues> sourceValues_;
};

template <class Element>
int64_t differences(const Element *in, int64_t step, uint64_t key, int64_t logical, int64_t logicalStep,
                    int64_t count) {
  int64_t wrong = 0;
  for (int64_t k = 0; k < count; ++k)
    wrong += in[k * step] != static_cast<Element>(elementHash(key, static_cast<uint64_t>(logical + k * logicalStep)));
  return wrong;
}

int64_t wrong(const std::byte *memory, const ElementRun &run, const ExpectedTensor &tensor,
              const SynthesizedValues &values) {
  const DType type = values.storageDtype;
  const int64_t item = itemBytes(type);
  if (!run.tensor || type == DType::boolean || tensor.fromSource() || !values.plain()) {
    int64_t count = 0;
    for (int64_t k = 0; k < run.count; ++k) {
      const std::optional<uint64_t> code = run.tensor ? tensor.code(values, run.logical + k * run.logicalStep) : 0;
      count += !code || std::memcmp(memory + (run.local + k * run.localStep) * item, &*code,
                                    static_cast<size_t>(item)) != 0; // little-endian
    }
    return count;
  }
  const std::byte *at = memory + run.local * item;
  switch (item) {
  case 1:
    return differences(reinterpret_cast<const uint8_t *>(at), run.localStep, tensor.key(), run.logical, run.logicalStep,
                       run.count);
  case 2:
    return differences(reinterpret_cast<const uint16_t *>(at), run.localStep, tensor.key(), run.logical,
                       run.logicalStep, run.count);
  case 4:
    return differences(reinterpret_cast<const uint32_t *>(at), run.localStep, tensor.key(), run.logical,
                       run.logicalStep, run.count);
  default:
    return differences(reinterpret_cast<const uint64_t *>(at), run.localStep, tensor.key(), run.logical,
                       run.logicalStep, run.count);
  }
}

std::string hex(const std::byte *at, int64_t bytes) {
  uint64_t code = 0;
  std::memcpy(&code, at, static_cast<size_t>(bytes));
  char text[24];
  std::snprintf(text, sizeof text, "0x%0*llx", static_cast<int>(2 * bytes), static_cast<unsigned long long>(code));
  return text;
}

/// Checks the instances of one mesh rank, one at a time.
class InstanceCheck {
public:
  InstanceCheck(const Plan &plan, const MeshRankMemory &memory, Reference &reference)
      : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(memory.endpoint)), memory_(memory),
        reference_(reference) {}

  /// Checks the elements of an instance in place.
  CheckResult elements(const ParamInstance &instance) const {
    const SynthesizedValues values(plan_.manifest(), *endpoint_.params()->Get(instance.param));
    const std::byte *memory = memory_.params[instance.param][instance.instance];
    const int64_t item = itemBytes(values.storageDtype);
    CheckResult result;
    ExpectedTensor tensor(reference_);
    Coverage coverage(instance.bytes / item);
    forEachRun(plan_.manifest(), endpoint_, instance.param, memory_.meshRank, instance, [&](const ElementRun &run) {
      tensor.select(run);
      coverage.add(run.local, run.localStep, run.count);
      const int64_t bad = wrong(memory, run, tensor, values);
      if (bad > 0 && result.first.empty())
        result.first = firstWrong(instance, memory, run, tensor, values);
      result.mismatches += static_cast<uint64_t>(bad);
    });
    result.checkedBytes = static_cast<uint64_t>(instance.bytes);
    result.ambiguity = tensor.ambiguity();
    addMissing(instance, coverage, result);
    return result;
  }

  /// Checks the params behind a quantized view of elements or plain scales: its base params must hold the quantized
  /// form of the values that the layout says were written to the view.
  CheckResult derived(const ParamInstance &instance) const {
    const QuantizedView &view = *endpoint_.params()->Get(instance.param)->view();
    CheckResult result;
    const Bytes written = this->written(instance, result);
    const std::vector<Bytes> expected =
        writeView(endpoint_, instance.param, memory_.meshRank, written.data(), tensorScales(instance));
    const std::vector<uint32_t> params = baseParams(view);
    for (size_t i = 0; i < params.size(); ++i) {
      const int64_t item = itemBytes(endpoint_.params()->Get(params[i])->dtype()),
                    count = static_cast<int64_t>(expected[i].size()) / item;
      const std::byte *found = memory_.params[params[i]][instance.instance];
      result.checkedBytes += expected[i].size();
      if (expected[i].empty() || std::memcmp(found, expected[i].data(), expected[i].size()) == 0)
        continue;
      for (int64_t e = 0; e < count; ++e) {
        const std::byte *right = expected[i].data() + e * item, *is = found + e * item;
        if (std::memcmp(right, is, static_cast<size_t>(item)) == 0)
          continue;
        ++result.mismatches;
        if (result.first.empty())
          result.first = where() + " param '" + nameOf(params[i], instance.instance) + "' element " +
                         std::to_string(e) + " (quantized as " + EnumNameQuantization(view.format()) + "): found " +
                         hex(is, item) + ", expected " + hex(right, item);
      }
    }
    return result;
  }

private:
  std::string where() const {
    return endpoint_.role()->str() + (endpoint_.storage() ? " file " : " rank ") +
           std::to_string(endpoint_.ranks()->Get(memory_.meshRank));
  }
  std::string nameOf(uint32_t param, uint32_t number) const {
    return instances(plan_.manifest(), endpoint_, param, memory_.meshRank)[number].name;
  }

  static void addMissing(const ParamInstance &instance, const Coverage &coverage, CheckResult &result) {
    const int64_t missing = coverage.missing();
    if (missing == 0)
      return;
    result.mismatches += static_cast<uint64_t>(missing);
    if (result.first.empty())
      result.first = "param '" + instance.name + "': " + std::to_string(missing) + " of " +
                     std::to_string(coverage.elements()) + " elements are covered by no part of its layout";
  }

  std::string firstWrong(const ParamInstance &instance, const std::byte *memory, const ElementRun &run,
                         const ExpectedTensor &tensor, const SynthesizedValues &values) const {
    const int64_t item = itemBytes(values.storageDtype);
    for (int64_t k = 0; k < run.count; ++k) {
      ElementRun one = run;
      one.logical += k * run.logicalStep;
      one.local += k * run.localStep;
      one.count = 1;
      if (wrong(memory, one, tensor, values) == 0)
        continue;
      const std::optional<uint64_t> code = run.tensor ? tensor.code(values, one.logical) : 0;
      return where() + " param '" + instance.name + "' element " + std::to_string(one.local) + " (" +
             (run.tensor ? "'" + *run.tensor + "' element " + std::to_string(one.logical) : std::string("padding")) +
             "): found " + hex(memory + one.local * item, item) +
             (code ? ", expected " + hex(reinterpret_cast<const std::byte *>(&*code), item)
                   : ", but the source does not hold this element");
    }
    return {};
  }

  /// The values that were written to a view.
  Bytes written(const ParamInstance &instance, CheckResult &result) const {
    const SynthesizedValues values(plan_.manifest(), *endpoint_.params()->Get(instance.param));
    const int64_t item = itemBytes(values.sentDtype);
    Bytes bytes(static_cast<size_t>(instance.bytes)); // padding is zero
    ExpectedTensor tensor(reference_);
    Coverage coverage(instance.bytes / item);
    forEachRun(plan_.manifest(), endpoint_, instance.param, memory_.meshRank, instance, [&](const ElementRun &run) {
      tensor.select(run);
      coverage.add(run.local, run.localStep, run.count);
      if (run.tensor && !tensor.fromSource())
        return fill(bytes.data(), run, tensor.key(), values);
      for (int64_t k = 0; run.tensor && k < run.count; ++k)
        if (const std::byte *from = tensor.at(run.logical + k * run.logicalStep, item))
          std::memcpy(bytes.data() + (run.local + k * run.localStep) * item, from, static_cast<size_t>(item));
        else if (++result.mismatches; result.first.empty())
          result.first = where() + " param '" + instance.name + "': the source does not hold '" + *run.tensor +
                         "' element " + std::to_string(run.logical + k * run.logicalStep);
    });
    result.ambiguity = tensor.ambiguity();
    addMissing(instance, coverage, result);
    return bytes;
  }

  /// For elements in nvfp4: the tensor scales, one for each matrix. They follow from the amax of the whole matrix, of
  /// which this instance may hold a part only.
  std::vector<float> tensorScales(const ParamInstance &instance) const {
    const Param &param = *endpoint_.params()->Get(instance.param);
    if (param.view()->kind() != ViewKind::elements || param.view()->format() != Quantization::nvfp4)
      return {};
    const SynthesizedValues values(plan_.manifest(), param);
    int64_t matrices = 1;
    for (size_t d = 0; d + 2 < instance.shape.size(); ++d)
      matrices *= instance.shape[d];
    std::vector<float> scales(static_cast<size_t>(matrices));
    for (uint32_t p = 0; p < orEmpty(endpoint_.params()).size(); ++p)
      if (const QuantizedView *view = endpoint_.params()->Get(p)->view();
          view && view->kind() == ViewKind::amax && view->codes() == instance.param) {
        const ParamInstance amax = sibling(endpoint_, instance, p, memory_.meshRank);
        forEachRun(plan_.manifest(), endpoint_, p, memory_.meshRank, amax, [&](ElementRun run) {
          for (; run.tensor && run.count > 0; --run.count, run.local += run.localStep, run.logical += run.logicalStep) {
            float &scale = scales[static_cast<size_t>(run.local / amax.shape.back())];
            scale = largerAmax(reference_.amax(run, values).value_or(scale), scale);
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
};

CheckResult checkMeshRank(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads,
                          bool viewsOnly) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
  const std::vector<bool> derived = derivedParams(endpoint);
  const InstanceCheck checks(plan, memory, reference);
  CheckResult result;
  std::mutex mutex;
  forEachInstance(plan, memory, threads, [&](const Endpoint &, const ParamInstance &instance) {
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

CheckResult check(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads) {
  Reference reference(plan, seed);
  return check(plan, memory, reference, threads);
}

CheckResult check(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads) {
  return checkMeshRank(plan, memory, reference, threads, false);
}

CheckResult checkViews(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads) {
  return checkMeshRank(plan, memory, reference, threads, true);
}

} // namespace reshard::analysis
