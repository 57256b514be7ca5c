// SPDX-License-Identifier: Apache-2.0
// Compares memory with memory through the layouts of the manifest, tensor by tensor: targets with sources, and replicas
// with each other.
#include "verify/check/compare.h"

#include "base/parallel.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/check/copy_room.h"
#include "verify/check/expected.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace reshard::verify {

namespace {

using namespace schema;

/// The first replica that holds an element.
const TensorInstance &firstReplica(const std::vector<TensorInstance> &replicas, int64_t wanted) {
  for (const TensorInstance &replica : replicas) {
    bool has = false;
    forEachRangeIn(replica, [&](const ElementRange &range) {
      for (int64_t k = 0; k < range.count; ++k)
        has = has || range.logical + k * range.logicalStep == wanted;
    });
    if (has)
      return replica;
  }
  return replicas[0];
}

/// Counts accesses of one thread and calls a function after about kBytes.
class Accesses {
public:
  static constexpr int64_t kBytes = 1 << 20;
  explicit Accesses(const std::function<void()> &call) : call_(call) {}
  void add(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ < kBytes)
      return;
    bytes_ = 0;
    if (call_)
      call_();
  }

private:
  const std::function<void()> &call_;
  int64_t bytes_ = 0;
};

/// Calls visit for parts of the ranges of an instance, each with accesses to about Accesses::kBytes of pages. The
/// elements of a transposed row are in many pages each: many rows are visited together, in parts that share their
/// pages.
template <class Visit> class Parts {
public:
  /// `item`: bytes of an element.
  Parts(int64_t item, Accesses &accesses, Visit visit) : item_(item), accesses_(accesses), visit_(std::move(visit)) {}

  void add(const ElementRange &range) {
    rows_.push_back(range);
    if (range.localStep == 1 || rows_.size() == kRows)
      flush();
  }
  void flush() {
    int64_t count = 0, step = 1;
    for (const ElementRange &row : rows_) {
      count = std::max(count, row.count);
      step = std::max(step, std::min(std::abs(row.localStep) * item_, kPage));
    }
    const int64_t most = std::max<int64_t>(Accesses::kBytes / step, 1);
    for (int64_t k = 0; k < count; k += most) {
      for (const ElementRange &row : rows_) {
        ElementRange part = row.at(k);
        part.count = std::min(row.count - k, most);
        if (part.count > 0)
          visit_(part);
      }
      accesses_.add(std::min(count - k, most) * step);
    }
    rows_.clear();
  }

private:
  static constexpr int64_t kPage = 4096;
  static constexpr size_t kRows = 1024;
  const int64_t item_;
  Accesses &accesses_;
  Visit visit_;
  std::vector<ElementRange> rows_;
};

const Param &paramOf(const Plan &plan, const TensorInstance &tensorInstance) {
  const InstanceLayout layout = layoutOf(plan, tensorInstance);
  return *layout.endpoint.params()->Get(layout.instance.param);
}

/// Whether two of the instances, or one instance twice, hold the same element of a tensor.
bool heldTwice(const Plan &plan, const std::vector<TensorInstance> &replicas) {
  TensorValues values;
  for (const TensorInstance &replica : replicas) {
    const int64_t item = itemBytes(storageDtypeOf(paramOf(plan, replica)));
    forEachRangeIn(replica, [&](const ElementRange &range) { values.refer(range, memoryOf(replica), item); });
  }
  return values.finish();
}

/// Compares the elements of a replica with those of the replicas before, and adds those that are new. Returns the first
/// that differs, or -1.
int64_t compareReplica(const Plan &plan, const TensorInstance &replica, TensorValues &before, Accesses &accesses,
                       uint64_t &comparedBytes) {
  const int64_t item = itemBytes(storageDtypeOf(paramOf(plan, replica)));
  const std::byte *memory = memoryOf(replica);
  int64_t differs = -1;
  Parts parts(item, accesses, [&](const ElementRange &range) {
    const bool contiguous = range.logicalStep == 1 && range.localStep == 1;
    for (int64_t k = 0; k < range.count;) {
      ElementRange rest = range.at(k);
      const ValueSpan known = before.span(rest.logical, contiguous ? range.count - k : 1, item);
      const std::byte *here = memory + rest.local * item;
      k += known.count;
      if (!known.data) {
        rest.count = known.count;
        before.put(rest, memory, item, false);
        continue;
      }
      comparedBytes += static_cast<uint64_t>(known.count * item);
      if (std::memcmp(here, known.data, static_cast<size_t>(known.count * item)) == 0)
        continue;
      const int64_t same = std::mismatch(here, here + known.count * item, known.data).first - here;
      if (const int64_t element = rest.logical + same / item; differs < 0 || element < differs)
        differs = element;
    }
  });
  forEachRangeIn(replica, [&](const ElementRange &range) { parts.add(range); });
  parts.flush();
  return differs;
}

/// Counts target elements that no part of their layout covers.
void checkCoverage(const Plan &plan, const MeshRankMemory &rankMemory, CheckResult &result) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(rankMemory.endpoint);
  const std::vector<bool> derived = derivedParams(endpoint);
  for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
    for (const ParamInstance &instance : instances(plan.manifest(), endpoint, p, rankMemory.meshRank)) {
      if (!rankMemory.params[p][instance.instance] || derived[p])
        continue;
      result.addUncovered(instance, coverageOf({plan.manifest(), endpoint, rankMemory.meshRank, instance}));
    }
}

/// A description of a quantized instance: its format, its shape, its base params and all elements that it holds, in
/// order. Equal texts mean equal blocks.
std::string blocksOf(const Plan &plan, const TensorInstance &elements, const std::vector<TensorInstance> &bases) {
  const QuantizedView &view = *paramOf(plan, elements).view();
  std::string text = std::to_string(static_cast<int>(view.format())) + "," +
                     std::to_string(static_cast<int>(view.scale_layout())) + " [";
  for (const int64_t length : elements.instance->shape)
    text += std::to_string(length) + " ";
  text += "]";
  for (const TensorInstance &base : bases)
    text +=
        " " + std::string(dtypeName(storageDtypeOf(paramOf(plan, base)))) + ":" + std::to_string(base.instance->bytes);
  forEachRange(layoutOf(plan, elements), [&](const ElementRange &range) {
    text += range.tensor ? " '" + *range.tensor + "'" : " padding";
    for (const int64_t number : {range.logical, range.logicalStep, range.local, range.localStep, range.count})
      text += " " + std::to_string(number);
  });
  return text;
}

/// The tensor pattern that a base param holds if its bytes are sent as they are: these are compared as tensors. -1:
/// none.
int64_t sentAs(const Plan &plan, const TensorInstance &base) {
  const auto &parts = orEmpty(paramOf(plan, base).parts());
  return parts.size() > 0 ? parts.Get(0)->pattern() : -1;
}

/// Compares the codes and scales of quantized params that hold the same elements in the same blocks: replicas of a
/// param, and tied params. Padding is part of its block. Other params of one tensor are not compared, since their
/// blocks may differ.
void compareQuantized(const Plan &plan, const RankMemories &source, ReplicaResult &result) {
  const Endpoint &endpoint = *plan.manifest().endpoints()->Get(0);
  std::map<std::string, std::vector<TensorInstance>> first; // by blocks, the base params of the first that has memory
  std::map<uint32_t, std::set<const void *>> blocksByParam; // entries of `first`
  for (const MeshRankMemory &rankMemory : source)
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p) {
      const QuantizedView *view = endpoint.params()->Get(p)->view();
      if (!view || view->kind() != ViewKind::elements)
        continue;
      std::vector<std::vector<ParamInstance>> bases;
      for (const uint32_t each : baseParams(*view))
        bases.push_back(instances(plan.manifest(), endpoint, each, rankMemory.meshRank));
      for (const ParamInstance &elements : instances(plan.manifest(), endpoint, p, rankMemory.meshRank)) {
        std::vector<TensorInstance> held;
        for (const std::vector<ParamInstance> &base : bases)
          held.push_back({&rankMemory, std::make_shared<const ParamInstance>(base[elements.instance])});
        const TensorInstance view{&rankMemory, std::make_shared<const ParamInstance>(elements)};
        const auto [at, added] = first.try_emplace(blocksOf(plan, view, held), held);
        blocksByParam[p].insert(&*at);
        for (size_t s = 0; s < held.size() && !added; ++s) {
          const TensorInstance &mine = held[s];
          TensorInstance &other = at->second[s];
          const std::byte *here = memoryOf(mine), *there = memoryOf(other);
          if (!there) // a checkpoint may have one of two tied params
            other = mine;
          if (!here || !there || (sentAs(plan, mine) >= 0 && sentAs(plan, mine) == sentAs(plan, other)))
            continue;
          result.comparedBytes += static_cast<uint64_t>(mine.instance->bytes);
          if (const auto same = std::mismatch(here, here + mine.instance->bytes, there).first - here;
              same < mine.instance->bytes)
            result.differences.push_back(nameOf(plan, mine) + " differs from " + nameOf(plan, other) +
                                         ": the first different byte is " + std::to_string(same));
        }
      }
    }
  std::map<uint32_t, std::set<uint32_t>> paramsByPattern; // params of the source
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p)
    for (const Part *part : orEmpty(endpoint.params()->Get(p)->parts()))
      if (part->pattern() >= 0)
        paramsByPattern[static_cast<uint32_t>(part->pattern())].insert(p);
  for (const auto &[pattern, params] : paramsByPattern) {
    const bool blocks =
        std::any_of(params.begin(), params.end(), [&](uint32_t p) { return blocksByParam.contains(p); });
    const bool equal = std::all_of(params.begin(), params.end(),
                                   [&](uint32_t p) { return blocksByParam[p] == blocksByParam[*params.begin()]; });
    if (blocks && !equal)
      result.skipped.push_back(plan.manifest().tensor_patterns()->Get(pattern)->name()->str());
  }
}

/// Compares one target instance with a tensor, or its padding with zeros if `name` is empty.
void compareInstance(const Plan &plan, const PlanConversions &conversions, const TensorInstance &target,
                     const std::string &name, const ExpectedTensor &expected, Accesses &accesses, CheckResult &result) {
  const SynthesizedValues values(conversions, paramOf(plan, target));
  const std::byte *memory = memoryOf(target);
  const int64_t item = itemBytes(values.storageDtype);
  Parts parts(item, accesses, [&](const ElementRange &range) {
    result.checkedBytes += static_cast<uint64_t>(range.count * item);
    const int64_t wrong = countWrong(memory, range, expected, values);
    if (wrong > 0 && result.first.empty())
      result.first = nameOf(plan, target) + ": " +
                     (name.empty() ? "padding is not zero"
                                   : "tensor '" + name + "' element " +
                                         std::to_string(firstWrong(memory, range, expected, values)->logical) +
                                         " differs from the source");
    result.mismatches += static_cast<uint64_t>(wrong);
  });
  forEachRangeIn(target, [&](const ElementRange &range) { parts.add(range); });
  parts.flush();
}

} // namespace

CheckResult compare(const Plan &plan, const RankMemories &source, const RankMemories &target, unsigned threads,
                    const CompareWatch &watch, const CompareProcess &among) {
  const auto isStorage = [&](const MeshRankMemory &rankMemory) {
    return plan.manifest().endpoints()->Get(rankMemory.endpoint)->storage();
  };
  const TensorInstances wanted(plan, target);
  std::vector<bool> mine; // by tensor: whether this process compares its instances in storage
  size_t stored = 0;      // such tensors, which are the same in all processes: other targets may differ
  for (const auto &[name, targets] : wanted.all()) {
    const bool any =
        std::any_of(targets.begin(), targets.end(), [&](const auto &each) { return isStorage(*each.rankMemory); });
    mine.push_back(any && stored % among.processes == among.process);
    stored += any;
  }
  Reference reference(plan, source, static_cast<size_t>(watch.copies / 4));
  CopyRoom copies(watch.copies);
  CheckResult result;
  std::mutex mutex;
  parallelFor(
      wanted.all().size(), threads,
      [&](size_t i) {
        const auto &[name, targets] = wanted.all()[i];
        const auto compared = [&](const auto &instance) { return mine[i] || !isStorage(*instance.rankMemory); };
        if (std::none_of(targets.begin(), targets.end(), compared))
          return;
        CheckResult one;
        copies.with(reference.copiedBytes(name), [&] {
          const ExpectedTensor expected(name, std::make_shared<const TensorValues>(reference.assemble(name)));
          one.ambiguity = expected.ambiguity();
          Accesses accesses(watch.accessed);
          for (const auto &tensorInstance : targets)
            if (compared(tensorInstance))
              compareInstance(plan, reference.conversions(), tensorInstance, name, expected, accesses, one);
        });
        const std::lock_guard lock(mutex);
        result.add(std::move(one));
      },
      watch.progress);
  for (const MeshRankMemory &rankMemory : target)
    if (among.process == 0 || !isStorage(rankMemory)) {
      result.add(checkViews(plan, rankMemory, reference, threads, copies, watch.accessed));
      checkCoverage(plan, rankMemory, result);
    }
  return result;
}

ReplicaResult compareReplicas(const Plan &plan, const RankMemories &source, unsigned threads,
                              const CompareWatch &watch) {
  const TensorInstances held(plan, source);
  ReplicaResult result;
  std::vector<std::vector<std::string>> found(held.all().size());
  std::mutex mutex;
  parallelFor(
      held.all().size(), threads,
      [&](size_t i) {
        const auto &[name, replicas] = held.all()[i];
        if (name.empty() || replicas.size() < 2) // padding is never read
          return;
        if (!heldTwice(plan, replicas))
          return;
        TensorValues tensor;
        Accesses accesses(watch.accessed);
        uint64_t compared = 0;
        for (size_t h = 0; h < replicas.size(); ++h) {
          const int64_t differs = compareReplica(plan, replicas[h], tensor, accesses, compared);
          if (differs >= 0)
            found[i].push_back(nameOf(plan, replicas[h]) + " differs from " +
                               nameOf(plan, firstReplica(replicas, differs)) + ": tensor '" + name +
                               "', the first different element is " + std::to_string(differs));
        }
        std::lock_guard lock(mutex);
        result.comparedBytes += compared;
      },
      watch.progress);
  for (auto &list : found)
    std::move(list.begin(), list.end(), std::back_inserter(result.differences));
  compareQuantized(plan, source, result);
  return result;
}

} // namespace reshard::verify
