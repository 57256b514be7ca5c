// SPDX-License-Identifier: Apache-2.0
// Finds from the manifest how each param of codes or scales is quantized, and counts them.
#include "report/inspect/quantized_forms.h"

#include "executor/load/load.h"
#include "schema/flatbuffer_vectors.h"
#include "schema/limits.h"
#include "verify/layout/quantized_views.h"

#include <algorithm>

namespace reshard::report {

using namespace verify;

using namespace schema;

namespace {

/// How a tensor pattern of codes or scales is produced.
struct Derived {
  reshard::Quantization format;
  QuantizedBy by;
  bool scales;
};

std::map<int32_t, Derived> derived(const Manifest &manifest) {
  std::map<int32_t, Derived> result;
  const Endpoint &source = *manifest.endpoints()->Get(0);
  auto add = [&](uint32_t param, Derived how) {
    for (const Part *part : orEmpty(source.params()->Get(param)->parts()))
      if (part->pattern() >= 0)
        result[part->pattern()] = how;
  };
  for (uint32_t p = 0; p < orEmpty(source.params()).size(); ++p)
    if (const QuantizedView *view = source.params()->Get(p)->view()) {
      switch (view->kind()) {
      case ViewKind::elements:
        for (const uint32_t base : baseParams(*view))
          add(base, {formatOf(*view).number, QuantizedBy::passthrough, base != view->codes()});
        break;
      case ViewKind::plain_scales:
        add(p, {formatOf(*view).number, QuantizedBy::passthrough, true});
        break;
      case ViewKind::codes:
      case ViewKind::scales:
        add(p, {formatOf(*view).number, QuantizedBy::sender, view->kind() == ViewKind::scales});
        break;
      case ViewKind::amax:
        add(p, {formatOf(*view).number, QuantizedBy::staged, true});
        break; // the receiver needs it for tensor scales
      }
    }
  return result;
}

} // namespace

std::vector<std::optional<QuantizedForm>> quantizedForms(const Manifest &manifest, uint32_t number) {
  const Endpoint &endpoint = *manifest.endpoints()->Get(number);
  const std::map<int32_t, Derived> tensorPatterns = derived(manifest);
  const auto &params = orEmpty(endpoint.params());
  std::vector<std::optional<QuantizedForm>> result(params.size());
  for (uint32_t p = 0; p < params.size(); ++p)
    if (const QuantizedView *view = params.Get(p)->view(); view && view->kind() == ViewKind::elements)
      for (const uint32_t base : baseParams(*view))
        result[base] = {formatOf(*view).number,
                        number == 0      ? QuantizedBy::held
                        : view->staged() ? QuantizedBy::staged
                                         : QuantizedBy::arrival,
                        scaleLayoutOf(*view), base == view->codes(), number == 0 ? -1 : static_cast<int32_t>(p)};
  if (number == 0)
    return result;
  // Params that receive codes or scales. Scales of a layout that is not plain are written through a view of plain
  // scales.
  std::map<uint32_t, int32_t> plain; // these scales -> their view
  for (uint32_t p = 0; p < params.size(); ++p)
    if (const QuantizedView *view = params.Get(p)->view(); view && view->kind() == ViewKind::plain_scales)
      plain[view->codes()] = static_cast<int32_t>(p);
  for (uint32_t p = 0; p < params.size(); ++p) {
    const auto by = plain.find(p);
    const auto &parts = orEmpty(params.Get(by == plain.end() ? p : static_cast<uint32_t>(by->second))->parts());
    if (result[p] || params.Get(p)->view() || parts.size() == 0)
      continue;
    if (const auto found = tensorPatterns.find(parts.Get(0)->pattern()); found != tensorPatterns.end())
      result[p] = {found->second.format, found->second.by,
                   by == plain.end() ? reshard::ScaleLayout::plain
                                     : scaleLayoutOf(*params.Get(static_cast<uint32_t>(by->second))->view()),
                   !found->second.scales, by == plain.end() ? -1 : by->second};
  }
  return result;
}

size_t derivedTensorPatterns(const Manifest &manifest) { return derived(manifest).size(); }

QuantizedCounts countQuantized(const Manifest &manifest, uint32_t number) {
  const Endpoint &endpoint = *manifest.endpoints()->Get(number);
  const auto forms = quantizedForms(manifest, number);
  QuantizedCounts counts;
  for (uint32_t p = 0; p < forms.size(); ++p) {
    const Param &param = *endpoint.params()->Get(p);
    const bool sends = param.view() && param.view()->kind() == ViewKind::codes, codes = forms[p] && forms[p]->codes;
    for (uint32_t meshRank = 0; (sends || codes) && meshRank < endpoint.ranks()->size(); ++meshRank)
      (codes ? counts.params[forms[p]->by][forms[p]->format] : counts.sends) +=
          instanceCount(endpoint, param, meshRank);
  }
  return counts;
}

namespace {

/// Adds to a number of bytes; returns false if it exceeds kMaxSize.
bool addBytes(uint64_t &sum, uint64_t more) {
  return !__builtin_add_overflow(sum, more, &sum) && sum <= static_cast<uint64_t>(kMaxSize);
}

constexpr uint32_t kFiles = UINT32_MAX; // a key beside the ranks: every rank may write files

/// Staged memory that the layouts determine.
struct StagedViews {
  std::map<uint32_t, uint64_t> bytes; // by rank, or kFiles: of staged views other than elements
  bool elements = false;              // whether a view of elements is staged: the segments have its bytes
};

Result<StagedViews> stagedViews(const Manifest &manifest) {
  StagedViews staged;
  for (uint32_t e = 0; e < manifest.endpoints()->size(); ++e) {
    const Endpoint &endpoint = *manifest.endpoints()->Get(e);
    for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p) {
      const Param &param = *endpoint.params()->Get(p);
      if (!param.view() || !param.view()->staged())
        continue;
      const bool elements = param.view()->kind() == ViewKind::elements;
      staged.elements = staged.elements || elements;
      for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size() && !elements; ++meshRank) {
        uint64_t each = static_cast<uint64_t>(itemBytes(param.dtype())), all = 0;
        for (const int64_t length : localShape(endpoint, param, meshRank))
          each *= static_cast<uint64_t>(length); // the loader has checked that these products are at most kMaxSize
        uint64_t &sum = staged.bytes[endpoint.storage() ? kFiles : endpoint.ranks()->Get(meshRank)];
        if (__builtin_mul_overflow(static_cast<uint64_t>(instanceCount(endpoint, param, meshRank)),
                                   stagedBytes({e, meshRank, p, 0, 1, 0, each}), &all) ||
            !addBytes(sum, all))
          return failed("param '" + param.name()->str() + "' of endpoint '" + endpoint.role()->str() +
                        "' and the params before it stage more than " + std::to_string(kMaxSize) +
                        " bytes on one rank, the largest supported size");
      }
    }
  }
  return staged;
}

} // namespace

Result<uint64_t> peakStagedBytes(const Plan &plan) {
  Result<StagedViews> views = stagedViews(plan.manifest());
  if (!views.ok())
    return views.status();
  uint64_t peak = 0;
  if (!views->elements && views->bytes.empty())
    return peak;
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    uint64_t sum = views->bytes[rank];
    std::shared_ptr<const Segment> segment;
    if (Status status = views->elements ? plan.segment(rank, segment) : Status(); !status.ok())
      return status;
    if (!addBytes(sum, views->bytes[kFiles]) || !addBytes(sum, segment ? arenaHeadBytes(*segment) : 0))
      return failed("rank " + std::to_string(rank) + " stages more than " + std::to_string(kMaxSize) +
                    " bytes, the largest supported size");
    peak = std::max(peak, sum);
  }
  return peak;
}

} // namespace reshard::report
