// SPDX-License-Identifier: Apache-2.0
// Makes the values of each tensor that the source sends, and keeps those that are needed again.
#include "verify/check/reference.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <limits>

namespace reshard::verify {

using namespace schema;

Reference::Reference(const Plan &plan, uint64_t seed)
    : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(0)), conversions_(plan.manifest()), seed_(seed),
      tensors_(kMaxCached), matrices_(kMaxCached) {
  for (uint32_t meshRank = 0; meshRank < endpoint_.ranks()->size(); ++meshRank) {
    rankMemories_.push_back({0, meshRank, {}});
    for (const Param *param : orEmpty(endpoint_.params()))
      rankMemories_.back().params.emplace_back(instanceCount(endpoint_, *param, meshRank), nullptr);
  }
  find(rankMemories_);
}

Reference::Reference(const Plan &plan, const RankMemories &source, size_t cached)
    : plan_(plan), endpoint_(*plan.manifest().endpoints()->Get(0)), conversions_(plan.manifest()), source_(&source),
      tensors_(cached), matrices_(cached) {
  find(source);
}

void Reference::find(const RankMemories &rankMemories) {
  baseOf_ = elementViews(endpoint_);
  for (uint32_t p = 0; p < baseOf_.size(); ++p)
    for (const Part *part : orEmpty(endpoint_.params()->Get(p)->parts()))
      if (part->pattern() >= 0 && (baseOf_[p] || endpoint_.params()->Get(p)->view()))
        tensorPatterns_.insert(part->pattern());
  // `amax` views are not read as tensors: the amax of a tensor is computed from its elements.
  for (const Param *param : orEmpty(endpoint_.params()))
    if (const QuantizedView *view = param->view();
        view && view->kind() == ViewKind::amax && orEmpty(param->parts()).size() > 0) {
      const int pattern = endpoint_.params()->Get(view->codes())->parts()->Get(view->part())->pattern();
      amaxOf_[param->parts()->Get(0)->pattern()] = {pattern,
                                                    view->amax_dimensions() == 0 ? 3 : view->amax_dimensions()};
      amaxViews_[view->codes()].push_back(param);
    }
  std::vector<bool> anyViewed; // by param
  for (const Param *param : orEmpty(endpoint_.params()))
    anyViewed.push_back(std::any_of(orEmpty(param->parts()).begin(), orEmpty(param->parts()).end(),
                                    [&](const Part *part) { return viewed(part->pattern()); }));
  const auto accept = [&](const MeshRankMemory &rankMemory, uint32_t p, uint32_t instance) {
    if (const QuantizedView *view = endpoint_.params()->Get(p)->view(); view && view->kind() == ViewKind::amax)
      return false;
    return (source_ || anyViewed[p] || sendsAmax(rankMemory, p)) && has(rankMemory, p, instance);
  };
  // One mesh rank of each rank class is enough to dequantize; without quantized views every instance in memory is read,
  // so that all replicas are covered.
  held_ = TensorInstances(plan_, rankMemories, accept, [&](uint32_t p) { return !source_ || anyViewed[p]; });
}

bool Reference::has(const MeshRankMemory &rankMemory, uint32_t p, uint32_t instance) const {
  if (!source_)
    return true;
  const QuantizedView *view = endpoint_.params()->Get(p)->view();
  if (!view)
    return rankMemory.params[p][instance] != nullptr;
  const std::vector<uint32_t> bases = baseParams(*view);
  return std::all_of(bases.begin(), bases.end(), [&](uint32_t each) { return has(rankMemory, each, instance); });
}

void Reference::forEachValue(const TensorInstance &held,
                             const std::function<void(const ElementRange &, const std::byte *)> &visit) {
  const Param &param = *endpoint_.params()->Get(held.instance->param);
  if (!param.view()) {
    const std::shared_ptr<const std::byte> memory = bytes(*held.rankMemory, *held.instance);
    return forEachRangeIn(held, [&](const ElementRange &range) { visit(range, memory.get()); });
  }
  // A param may stack many matrices, each of another tensor: those that this tensor meets are enough.
  int64_t elements = 1; // in a matrix
  for (const int64_t length : held.instance->shape)
    elements *= length;
  elements /= std::max<int64_t>(matrixCount(endpoint_, held.instance->param, held.rankMemory->meshRank), 1);
  std::shared_ptr<const Bytes> values;
  int64_t number = -1;
  const auto visitIn = [&](const ElementRange &range) {
    for (int64_t k = 0; k < range.count;) {
      ElementRange part = range.at(k);
      if (const int64_t wanted = part.local / elements; wanted != number) {
        number = wanted;
        values.reset(); // one is in memory
        values = matrix(held, number);
      }
      part.local -= number * elements;
      part.count =
          range.localStep > 0 ? std::min(range.count - k, (elements - part.local - 1) / range.localStep + 1) : 1;
      WorkDeadline::spend(part.count);
      visit(part, values->data());
      k += part.count;
    }
  };
  // In the order of memory, so that each matrix is dequantized once: the tensor's dimensions may have another order.
  forEachGridIn(held, [&](PartGrid &grid) {
    const auto stride = [](const PartGrid::Dimension &dimension) {
      return dimension.positions() > 1 ? dimension.localStride : std::numeric_limits<int64_t>::max();
    };
    std::stable_sort(grid.dimensions.begin(), grid.dimensions.end(),
                     [&](const auto &a, const auto &b) { return stride(a) > stride(b); });
    forEachRangeOf(grid, visitIn);
  });
}

std::shared_ptr<const std::byte> Reference::bytes(const MeshRankMemory &rankMemory, const ParamInstance &instance) {
  if (source_)
    return {std::shared_ptr<const std::byte>(), rankMemory.params[instance.param][instance.instance]};
  if (const auto &by = baseOf_[instance.param]) {
    const auto all = quantized(rankMemory, sibling(endpoint_, instance, by->view, rankMemory.meshRank));
    return {all, (*all)[by->number].data()};
  }
  const auto result = instances_.get(
      {rankMemory.meshRank, instance.param, instance.instance, 0},
      [&] {
        auto own = std::make_shared<Bytes>(static_cast<size_t>(instance.bytes));
        synthesizeInstance(conversions_, layoutOf(rankMemory, instance), seed_, own->data());
        return own;
      },
      [](const Bytes &bytes) { return bytes.size(); });
  return {result, result->data()};
}

std::shared_ptr<const Bytes> Reference::matrix(const TensorInstance &view, int64_t number) {
  const ParamInstance &instance = *view.instance;
  const uint32_t meshRank = view.rankMemory->meshRank;
  return matrices_.get(
      {meshRank, instance.param, instance.instance, static_cast<uint64_t>(number)},
      [&] {
        WorkDeadline::spend(instance.bytes / std::max<int64_t>(matrixCount(endpoint_, instance.param, meshRank), 1));
        std::vector<std::shared_ptr<const std::byte>> bases;
        std::vector<const std::byte *> memory;
        for (const uint32_t each : baseParams(*endpoint_.params()->Get(instance.param)->view())) {
          bases.push_back(bytes(*view.rankMemory, sibling(endpoint_, instance, each, meshRank)));
          memory.push_back(bases.back().get());
        }
        return std::make_shared<Bytes>(readMatrix(endpoint_, instance.param, meshRank, memory, number));
      },
      [](const Bytes &bytes) { return bytes.size(); });
}

/// The codes and scales of synthesized elements.
std::shared_ptr<const std::vector<Bytes>> Reference::quantized(const MeshRankMemory &rankMemory,
                                                               const ParamInstance &elements) {
  return quantized_.get(
      {rankMemory.meshRank, elements.param, elements.instance, 0},
      [&] {
        return std::make_shared<std::vector<Bytes>>(
            synthesizeBases(conversions_, layoutOf(rankMemory, elements), seed_));
      },
      [](const std::vector<Bytes> &list) {
        size_t sum = 0;
        for (const Bytes &bytes : list)
          sum += bytes.size();
        return sum;
      });
}

InstanceLayout Reference::layoutOf(const MeshRankMemory &rankMemory, const ParamInstance &instance) const {
  return {plan_.manifest(), endpoint_, rankMemory.meshRank, instance};
}

TensorValues Reference::assemble(const std::string &name) {
  TensorValues tensor;
  if (!name.empty())
    for (const TensorInstance &held : held_.of(name)) {
      const int64_t item = itemBytes(endpoint_.params()->Get(held.instance->param)->dtype());
      forEachValue(held, [&](const ElementRange &range, const std::byte *memory) {
        if (source_ && !viewed(range.pattern))
          tensor.refer(range, memory, item);
        else
          tensor.put(range, memory, item, viewed(range.pattern));
      });
    }
  tensor.finish();
  return tensor;
}

uint64_t Reference::copiedBytes(const std::string &name) {
  uint64_t bytes = 0;
  if (name.empty())
    return bytes;
  for (const TensorInstance &held : held_.of(name)) {
    const Copies copies = copiesOf(held);
    if (const uint32_t param = held.instance->param; endpoint_.params()->Get(param)->view())
      bytes += static_cast<uint64_t>(held.instance->bytes /
                                     std::max<int64_t>(matrixCount(endpoint_, param, held.rankMemory->meshRank), 1));
    if (copies.elements)
      bytes += std::min(copies.tensorBytes, static_cast<uint64_t>(held.instance->bytes));
  }
  return bytes;
}

Reference::Copies Reference::copiesOf(const TensorInstance &held) {
  const std::lock_guard lock(copiesMutex_);
  const auto [at, added] = copies_.try_emplace(held.instance->param);
  Copies &copies = at->second;
  if (!added)
    return copies;
  const int64_t item = itemBytes(endpoint_.params()->Get(held.instance->param)->dtype());
  forEachCollapsedGrid(verify::layoutOf(plan_, held), [&](const PartGrid &grid) {
    if (!grid.tensor || grid.elements() == 0)
      return;
    const PartGrid::Dimension *last = grid.dimensions.empty() ? nullptr : &grid.dimensions.back();
    copies.elements = copies.elements || viewed(grid.pattern) || !last || last->localStride != 1 ||
                      last->logicalStride != 1 || last->blocks.front().length() * item < TensorValues::kMinReferred;
    copies.tensorBytes = std::max(copies.tensorBytes, static_cast<uint64_t>(grid.elements() * item));
  });
  return copies;
}

std::shared_ptr<const TensorValues> Reference::tensor(const std::string &name) {
  return tensors_.get(
      name, [&] { return std::make_shared<const TensorValues>(assemble(name)); },
      [](const TensorValues &tensor) { return tensor.copiedBytes(); });
}

std::optional<float> Reference::amax(const ElementRange &range, const SynthesizedValues &values) {
  const auto of = amaxOf_.find(range.pattern);
  if (of == amaxOf_.end())
    return std::nullopt;
  const auto &tensorPatterns = *plan_.manifest().tensor_patterns();
  const TensorPattern &pattern = *tensorPatterns.Get(static_cast<uint32_t>(of->second.pattern)),
                      &numbers = *tensorPatterns.Get(static_cast<uint32_t>(range.pattern));
  // The name of an `amax` tensor is the name of its matrix with a suffix.
  const std::string name =
      range.tensor->substr(0, range.tensor->size() - (numbers.name()->size() - pattern.name()->size()));
  const auto list = amax_.get(
      *range.tensor, [&] { return std::make_shared<std::vector<float>>(amax(name, of->second, values)); },
      [](const std::vector<float> &list) { return list.size() * sizeof(float); });
  const auto shards = static_cast<int64_t>(numbers.shape()->Get(numbers.shape()->size() - 1));
  const auto number = static_cast<size_t>(range.logical / std::max<int64_t>(shards, 1));
  return number < list->size() ? std::optional((*list)[number]) : std::nullopt;
}

/// The amax of a tensor over the dimensions of `of`, one for each position along the other dimensions.
std::vector<float> Reference::amax(const std::string &name, const AmaxMatrices &of, const SynthesizedValues &values) {
  constexpr int64_t kAtOnce = 4096;
  const auto &shape = orEmpty(plan_.manifest().tensor_patterns()->Get(static_cast<uint32_t>(of.pattern))->shape());
  const auto isReduced = [&](uint32_t d) { return (of.dimensions >> (shape.size() - 1 - d) & 1) != 0; };
  uint32_t inner = shape.size(); // from here on, the amax is over all dimensions
  while (inner > 0 && isReduced(inner - 1))
    --inner;
  int64_t together = 1, count = 1; // consecutive elements with the same amax; number of amax values
  for (uint32_t d = 0; d < shape.size(); ++d)
    (d >= inner ? together : count) *= d >= inner || !isReduced(d) ? static_cast<int64_t>(shape.Get(d)) : 1;
  const auto numberOf = [&](int64_t row) { // index of the amax of such a row of elements
    int64_t number = 0, stride = 1;
    for (uint32_t d = inner; d-- > 0;) {
      const auto length = static_cast<int64_t>(shape.Get(d));
      if (!isReduced(d)) {
        number += row % length * stride;
        stride *= length;
      }
      row /= length;
    }
    return static_cast<size_t>(number);
  };
  const int64_t item = itemBytes(values.sentDtype);
  const uint64_t key = tensorKey(name, seed_);
  const bool generated = synthesized() && !viewed(of.pattern);
  Bytes some(static_cast<size_t>(kAtOnce * item));
  std::vector<float> list(static_cast<size_t>(count));
  for (const TensorInstance &held : held_.of(name)) {
    if (!sendsAmax(*held.rankMemory, held.instance->param))
      continue;
    const auto add = [&](const ElementRange &range, const std::byte *memory) {
      for (int64_t k = 0, taken = 0; k < range.count; k += taken) {
        ElementRange part;
        part.logical = range.logical + k * range.logicalStep;
        part.logicalStep = range.logicalStep;
        const int64_t row = part.logical / together;
        const int64_t most =
            range.logicalStep > 0 ? ((row + 1) * together - 1 - part.logical) / range.logicalStep + 1 : 1;
        part.count = taken = std::min({kAtOnce, range.count - k, most});
        WorkDeadline::spend(part.count);
        if (generated)
          fill(some.data(), part, key, values);
        for (int64_t i = 0; !generated && i < part.count; ++i)
          std::memcpy(some.data() + i * item, memory + (range.local + (k + i) * range.localStep) * item,
                      static_cast<size_t>(item));
        float &magnitude = list[numberOf(row)];
        magnitude = largerAmax(amaxOf(values.sentDtype, some.data(), part.count), magnitude);
      }
    };
    if (generated)
      forEachRangeIn(held, [&](const ElementRange &range) { add(range, nullptr); });
    else
      forEachValue(held, add);
  }
  return list;
}

/// Whether the amax of a param is sent from a mesh rank: not from mesh ranks that may not be read (authority).
bool Reference::sendsAmax(const MeshRankMemory &rankMemory, uint32_t number) const {
  const auto views = amaxViews_.find(number);
  if (views == amaxViews_.end())
    return false;
  for (const Param *param : views->second)
    for (const Part *part : *param->parts()) {
      const PartDimension &shard = *part->dimensions()->Get(part->dimensions()->size() - 1);
      const IndexMap list = indexMap(endpoint_, *endpoint_.shardings()->Get(shard.sharding()), rankMemory.meshRank);
      if (list.begin != list.end)
        return true;
    }
  return false;
}

} // namespace reshard::verify
