// SPDX-License-Identifier: Apache-2.0
// Collects the rows of blocks that a rank must complete before it converts them, assigns them to phases and offsets of
// the arena, and cuts descriptors at their ends.
#include "compiler/schedule/staged_ranges.h"

#include "compiler/schedule/flow_descriptors.h"
#include "compiler/schedule/message_plan.h"
#include "compiler/transfer/staging.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

constexpr int64_t kMaxPhaseBytes = 256 << 20; // staged in one phase if there is no staging limit

bool isStaged(const Param &param) { return param.view && param.view->kind == ViewKind::elements && param.view->staged; }

} // namespace

StagedRanges::StagedRanges(const Layout &layout) : layout_(layout), ranges_(layout.world), bytes_(layout.world) {
  firsts_.resize(layout.endpoints.size());
  for (size_t e = 1; e < layout.endpoints.size(); ++e) {
    const Endpoint &endpoint = layout.endpoints[e];
    const bool hasViews = std::any_of(endpoint.params.begin(), endpoint.params.end(),
                                      [](const Param &param) { return param.view.has_value(); });
    for (int64_t meshRank = 0; hasViews && meshRank < endpoint.meshRanks(); ++meshRank) {
      std::vector<uint32_t> &firsts = firsts_[e].emplace_back();
      uint32_t next = 0;
      for (const Param &param : endpoint.params) {
        firsts.push_back(next);
        next += static_cast<uint32_t>(instances(endpoint, param, meshRank));
      }
    }
  }
}

unsigned StagedRanges::paramOf(unsigned endpoint, int32_t meshRank, uint32_t instance) const {
  const std::vector<uint32_t> &firsts = firsts_[endpoint][static_cast<size_t>(meshRank)];
  return static_cast<unsigned>(std::upper_bound(firsts.begin(), firsts.end(), instance) - firsts.begin()) - 1;
}

int32_t StagedRanges::writer(unsigned e, int32_t meshRank, uint32_t instance) const {
  const Endpoint &endpoint = layout_.endpoints[e];
  if (!endpoint.storage)
    return endpoint.ranks[meshRank];
  if (firsts_[e].empty())
    return -1;
  const unsigned param = paramOf(e, meshRank, instance);
  const QuantizedView *view = endpoint.params[param].view ? &*endpoint.params[param].view : nullptr;
  if (!view || view->kind == ViewKind::codes ||
      (view->kind == ViewKind::elements && !view->staged && !formatOf(view->format).tensorScale()))
    return -1;
  // Amax are written by the rank that writes the elements.
  const unsigned codes = view->kind == ViewKind::amax ? endpoint.params[view->codes].view->codes : view->codes;
  return static_cast<int32_t>(
      (codes + static_cast<int64_t>(instance) - firsts_[e][static_cast<size_t>(meshRank)][param] + meshRank) %
      layout_.world);
}

uint32_t StagedRanges::phaseOf(const Param &param) const {
  return param.view && param.view->kind == ViewKind::elements && formatOf(param.view->format).tensorScale()
             ? 1
             : 0; // phase 1 follows the amax
}

const StagedRange *StagedRanges::find(unsigned endpoint, int32_t meshRank, uint32_t instance, int64_t offset) const {
  const auto at = byInstance_.find({endpoint, meshRank, instance});
  if (at == byInstance_.end())
    return nullptr;
  return &*std::prev(std::upper_bound(at->second.begin(), at->second.end(), offset,
                                      [](int64_t o, const StagedRange &range) { return o < range.begin; }));
}

std::vector<std::vector<StagedRanges::Rows>> StagedRanges::rows() const {
  std::vector<std::vector<Rows>> result(layout_.world);
  for (unsigned e = 1; e < layout_.endpoints.size(); ++e) {
    const Endpoint &endpoint = layout_.endpoints[e];
    for (unsigned p = 0; p < endpoint.params.size(); ++p) {
      const Param &param = endpoint.params[p];
      if (!isStaged(param))
        continue;
      for (int32_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank) {
        const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
        const int64_t bytes = localBytes(endpoint, param, meshRank), count = instances(endpoint, param, meshRank);
        const int64_t width = shape.back() * itemBytes(param.dtype), height = shape[shape.size() - 2];
        for (int64_t i = 0; i < count && bytes > 0; ++i) {
          const uint32_t instance = firsts_[e][static_cast<size_t>(meshRank)][p] + static_cast<uint32_t>(i);
          result[static_cast<size_t>(writer(e, meshRank, instance))].push_back(
              {{e, meshRank, instance, 0, bytes, 0, 0},
               std::min(formatOf(param.view->format).blockRows, height) * width,
               height * width,
               phaseOf(param) > 0,
               endpoint.params[param.view->codes].name});
        }
      }
    }
  }
  return result;
}

llvm::Error StagedRanges::plan(int64_t remote) {
  std::vector<std::vector<Rows>> all = rows();
  if (std::all_of(all.begin(), all.end(), [](const std::vector<Rows> &rows) { return rows.empty(); }))
    return llvm::Error::success();
  const std::vector<std::vector<BufferRange>> ranges = buffers(layout_);
  const int64_t staging = remote > 0 ? 8 * (2 * kStagingAlignment + remote / kMaxPlanChunks) : 0; // for messages
  int64_t least = 0;     // for the ranks that stage rows
  int64_t leastRest = 0; // for the others, which roundLimits checks
  const Rows *largest = nullptr;
  for (int32_t rank = 0; rank < layout_.world; ++rank) {
    const int64_t fixed = stagedBytes(layout_, ranges[rank]);
    if (all[rank].empty()) {
      leastRest = std::max(leastRest, fixed + staging);
      continue;
    }
    const Rows &row = *std::max_element(all[rank].begin(), all[rank].end(),
                                        [](const Rows &a, const Rows &b) { return a.row < b.row; });
    const int64_t needs = fixed + alignUp(row.row) + staging;
    if (needs > least) {
      least = needs;
      largest = &row;
    }
    if (layout_.stagingLimit == 0 || needs <= layout_.stagingLimit)
      planRank(rank, all[rank],
               layout_.stagingLimit == 0
                   ? kMaxPhaseBytes
                   : std::min((layout_.stagingLimit - fixed) / 2, layout_.stagingLimit - fixed - staging));
  }
  if (layout_.stagingLimit > 0 && least > layout_.stagingLimit)
    return llvm::make_error<StagingLimitError>(layout_.stagingLimit, std::max(least, leastRest),
                                               "a row of blocks of param '" + largest->name + "' (" +
                                                   std::to_string(largest->row) +
                                                   " bytes) and the other staged bytes of a rank");
  return llvm::Error::success();
}

/// Places rows of blocks one after the other in the arena. If a row does not fit, a new phase begins, again at offset
/// 0. Rows that need tensor scales follow all others, not before phase 1.
void StagedRanges::planRank(int32_t rank, std::vector<Rows> &rows, int64_t limit) {
  int64_t budget = limit;
  for (const Rows &each : rows)
    budget = std::max(budget, alignUp(each.row));
  std::stable_sort(rows.begin(), rows.end(), [](const Rows &a, const Rows &b) { return a.later < b.later; });
  uint32_t phase = 0;
  int64_t used = 0;
  for (const Rows &each : rows) {
    if (each.later && phase == 0) {
      phase = 1;
      used = 0;
    }
    for (int64_t at = 0; at < each.all.end;) {
      // Take as many rows as fit; the last one of a matrix may be shorter.
      int64_t end = at;
      auto next = [&](int64_t from) { return std::min(from + each.row, (from / each.matrix + 1) * each.matrix); };
      while (end < each.all.end && used + alignUp(next(end) - at) <= budget)
        end = next(end);
      if (end == at) {
        ++phase;
        used = 0;
        continue;
      }
      StagedRange range = each.all;
      range.begin = at;
      range.end = end;
      range.phase = phase;
      range.offset = used;
      used += alignUp(end - at);
      bytes_[rank] = std::max(bytes_[rank], used);
      ranges_[rank].push_back(range);
      byInstance_[{range.endpoint, range.meshRank, range.instance}].push_back(range);
      at = end;
    }
  }
}

void cutAtStagedRanges(const Descriptor &d, const StagedRanges &stagedRanges, Interner<Shape> &shapes,
                       std::vector<Descriptor> &parts) {
  std::vector<Descriptor> left = {d};
  while (!left.empty()) {
    const Descriptor next = left.back();
    const Shape shape = shapes[next.shape];
    left.pop_back();
    int64_t low = next.targetOffset, high = low + shape.rowBytes - 1;
    const Loop *longest = nullptr; // the loop with the longest reach: over instances first, then over bytes
    auto reach = [](const Loop &loop) {
      return std::make_pair(std::abs(loop.targetStep) * (loop.count - 1),
                            std::abs(loop.targetStride) * (loop.count - 1));
    };
    bool one = true;
    for (const Loop &loop : shape.loops) {
      one = one && loop.targetStep == 0;
      (loop.targetStride < 0 ? low : high) += loop.targetStride * (loop.count - 1);
      if (!longest || reach(loop) > reach(*longest))
        longest = &loop;
    }
    const StagedRange *range = one ? stagedRanges.find(next.endpoint, next.target, next.targetInstance, low) : nullptr;
    if (one && (!range || high < range->end)) {
      parts.push_back(next);
      continue;
    }
    auto put = [&](int64_t at, const Loop &step, Shape part) {
      left.push_back(stepped(next, at, step, shapes.intern(std::move(part))));
    };
    if (!longest) {
      put(range->end - low, {shape.rowBytes, 1, 1, 0, 0}, {high + 1 - range->end, {}});
      put(0, {shape.rowBytes, 1, 1, 0, 0}, {range->end - low, {}});
      continue;
    }
    const size_t number = static_cast<size_t>(longest - shape.loops.data());
    const int64_t half = longest->count / 2;
    for (const auto &[from, count] : {std::pair(half, longest->count - half), std::pair(int64_t{0}, half)}) {
      Shape part = shape;
      part.loops[number].count = count;
      if (count == 1)
        part.loops.erase(part.loops.begin() + static_cast<ptrdiff_t>(number));
      put(from, shape.loops[number], std::move(part));
    }
  }
}

} // namespace reshard
