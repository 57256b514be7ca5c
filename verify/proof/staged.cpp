// SPDX-License-Identifier: Apache-2.0
// Follows staged bytes through a rank's arena: the steps that write, quantize and copy them, in their order.
#include "verify/proof/staged.h"

#include "schema/flatbuffer_vectors.h"
#include "schema/manifest.h"
#include "verify/proof/contents.h"

#include <algorithm>
#include <utility>

namespace reshard::verify {

using namespace schema;

Status StagedMoves::fail(uint32_t step, const std::string &why) const {
  return failed("rank " + std::to_string(rank_) + " step " + std::to_string(step) + why);
}

bool StagedMoves::waits(uint32_t number, uint32_t earlier) {
  if (std::exchange(lookedAt_, number) != number) {
    const Step &step = *segment_->steps()->Get(number);
    after_.clear();
    for (uint32_t i = 0; i < step.after_count(); ++i)
      after_.push_back(segment_->after()->Get(step.first_after() + i));
    std::sort(after_.begin(), after_.end());
  }
  return std::binary_search(after_.begin(), after_.end(), earlier);
}

/// Whether the rank stages elements to quantize them.
bool StagedMoves::stages() const {
  return std::any_of(orEmpty(segment_->buffers()).begin(), orEmpty(segment_->buffers()).end(),
                     [&](const BufferRange *run) {
                       const QuantizedView *view =
                           plan_.manifest().endpoints()->Get(run->endpoint())->params()->Get(run->param())->view();
                       return run->endpoint() > 0 && view && view->kind() == ViewKind::elements && view->staged();
                     });
}

/// Whether a step waits for a copy from the arena, directly or through later copies that wait for it.
bool StagedMoves::waitsForCopy(uint32_t step, uint32_t copy) {
  const auto from = std::find(copies_.begin(), copies_.end(), copy);
  return waits(step, copy) || std::any_of(from, copies_.end(), [&](uint32_t later) { return waits(step, later); });
}

Status StagedMoves::forEachMove(uint32_t rank, const std::function<void(const Move &)> &visit) {
  rank_ = rank;
  lookedAt_ = UINT32_MAX;
  segment_ = &paired_.segment(rank);
  arrivals_.clear();
  quantizedRanges_.clear();
  amaxWriters_.clear();
  reduced_.clear();
  copies_.clear();
  Status status;
  const bool anyStaged = stages(); // else the arena has only relayed bytes, which receivers resolve
  for (uint32_t s = 0; s < orEmpty(segment_->steps()).size() && status.ok(); ++s) {
    const Step &step = *segment_->steps()->Get(s);
    for (uint32_t i = 0; step.kind() == StepKind::reduce && i < step.input_count() && status.ok(); ++i) {
      const uint32_t buffer = segment_->operands()->Get(step.first_input() + i)->buffer();
      for (const uint32_t writer : amaxWriters_[buffer])
        if (!waits(s, writer))
          status =
              fail(s, " reduces amax values that step " + std::to_string(writer) + " writes, but does not wait for it");
      reduced_[buffer] = s;
    }
    uint32_t last = 0; // the last checked buffer: most rows of a step go to few buffers
    Status loaded = paired_.forEachMove(rank, s, [&](const Move &move) {
      const bool stages = move.targetBuffer == 0, quantizes = !stages && move.sourceBuffer == 0 && !move.zero;
      if (stages && !anyStaged)
        return;
      if (stages && status.ok())
        status = write(s, move);
      else if (quantizes && step.kind() == StepKind::recv && status.ok())
        status = relayed_.resolve(move, paired_.send(step.message()), visit);
      else if (quantizes)
        forEachRow(move, [&](const Move &row) {
          if (status.ok())
            status = read(s, row, visit);
        });
      else if (status.ok())
        visit(move);
      if (!stages && status.ok() && std::exchange(last, move.targetBuffer) != move.targetBuffer)
        status = scale(s, move.targetBuffer);
    });
    if (status.ok())
      status = std::move(loaded);
    if (step.kind() == StepKind::copy && segment_->operands()->Get(step.first_input())->buffer() == 0) {
      if (!copies_.empty() && !waits(s, copies_.back()))
        copies_.clear(); // the earlier copies may still run when this one is done
      copies_.push_back(s);
    }
  }
  if (status.ok() && !arrivals_.empty())
    status = fail(arrivals_.begin()->second.step, " stages bytes at " + std::to_string(arrivals_.begin()->first) +
                                                      " of the arena that are never quantized");
  return status;
}

/// Records a move to the arena. It may reuse bytes only if it waits for the step that quantized their previous
/// contents. read() checks that no byte is written twice.
Status StagedMoves::write(uint32_t step, const Move &move) {
  uint64_t begin = move.targetOffset, end = begin + move.rowBytes;
  for (const Move::Loop &loop : move.loops)
    (loop.target < 0 ? begin : end) += static_cast<uint64_t>((loop.count - 1) * loop.target);
  auto at = quantizedRanges_.upper_bound(begin);
  if (at != quantizedRanges_.begin() && std::prev(at)->second.end > begin)
    --at;
  for (; at != quantizedRanges_.end() && at->first < end; ++at)
    if (!waitsForCopy(step, at->second.step))
      return fail(step, " overwrites staged bytes that step " + std::to_string(at->second.step) +
                            " quantizes, but does not wait for it");
  arrivals_.emplace(begin, Arrival{move, step, end});
  return {};
}

/// Whether the arrivals that begin in a range cover the range, each byte exactly once. Sets `missing` to an uncovered
/// byte, if there is one.
bool StagedMoves::coversOnce(uint64_t begin, uint64_t end, uint64_t &missing) {
  RegularSets sets;
  for (auto at = arrivals_.lower_bound(begin); at != arrivals_.end() && at->first < end; ++at)
    if (at->second.end > end || !addTo(sets, at->second.move))
      return false;
  sets.finish();
  NestSplitter splitter(sets, work_);
  const SplitStatus status =
      splitter.run({static_cast<int64_t>(begin), 0, 0, {{static_cast<int64_t>(end - begin), 1, 0, 0}}},
                   [](const Fragment &) { return true; });
  if (status == SplitStatus::missing)
    missing = static_cast<uint64_t>(splitter.position());
  return status == SplitStatus::done && sets.positions() == static_cast<int64_t>(end - begin);
}

/// Replaces arrivals with several rows that extend beyond a range by their rows. Returns whether there was one.
bool StagedMoves::split(uint64_t begin, uint64_t end) {
  std::vector<Arrival> whole;
  for (auto at = arrivals_.begin(); at != arrivals_.end() && at->first < end;) {
    const bool beyond =
        at->second.end > begin && (at->first < begin || at->second.end > end) && !at->second.move.loops.empty();
    if (beyond)
      whole.push_back(std::move(at->second));
    at = beyond ? arrivals_.erase(at) : std::next(at);
  }
  for (const Arrival &arrival : whole)
    forEachRow(arrival.move, [&](const Move &row) {
      arrivals_.emplace(row.targetOffset, Arrival{row, arrival.step, row.targetOffset + row.rowBytes});
    });
  return !whole.empty();
}

Status StagedMoves::read(uint32_t step, const Move &row, const std::function<void(const Move &)> &visit) {
  const uint64_t begin = row.sourceOffset, end = begin + row.rowBytes;
  uint64_t missing = end;
  bool covered = coversOnce(begin, end, missing);
  if (!covered && split(begin, end)) {
    missing = end;
    covered = coversOnce(begin, end, missing);
  }
  if (!covered) {
    for (const auto &[from, arrival] : arrivals_)
      if (from < end && arrival.end > begin && (from < begin || arrival.end > end))
        return fail(step, " quantizes only a part of a contiguous row that was staged at byte " + std::to_string(from));
    return missing < end
               ? fail(step, " quantizes arena byte " + std::to_string(missing) + ", which no earlier step wrote")
               : fail(step,
                      " quantizes arena bytes from " + std::to_string(begin) + ", some of which were written twice");
  }
  for (auto at = arrivals_.lower_bound(begin); at != arrivals_.end() && at->first < end; at = arrivals_.erase(at)) {
    if (!waits(step, at->second.step))
      return fail(step, " quantizes bytes that step " + std::to_string(at->second.step) +
                            " stages, but does not wait for it");
    Move straight = at->second.move;
    straight.targetBuffer = row.targetBuffer;
    straight.targetOffset += row.targetOffset - begin;
    visit(straight);
  }
  // Record that this step is the last that quantized the range.
  auto at = quantizedRanges_.upper_bound(begin);
  if (at != quantizedRanges_.begin() && std::prev(at)->second.end > begin)
    --at;
  while (at != quantizedRanges_.end() && at->first < end) {
    const auto [from, before] = *at;
    at = quantizedRanges_.erase(at);
    if (from < begin)
      quantizedRanges_[from] = {begin, before.step};
    if (before.end > end)
      at = quantizedRanges_.emplace(end, before).first;
  }
  quantizedRanges_[begin] = {end, step};
  return {};
}

/// Checks that a step that quantizes elements with a tensor scale waits for it. Records the steps that write amax
/// values.
Status StagedMoves::scale(uint32_t step, uint32_t buffer) {
  const auto &runs = orEmpty(segment_->buffers());
  const BufferRange &run = *bufferRangeOf(*segment_, buffer);
  const auto &params = *plan_.manifest().endpoints()->Get(run.endpoint())->params();
  const QuantizedView *view = params.Get(run.param())->view();
  if (!view)
    return {};
  if (view->kind() == ViewKind::amax)
    amaxWriters_[buffer].push_back(step);
  if (view->kind() != ViewKind::elements || !formatOf(*view).tensorScale())
    return {};
  for (const BufferRange *other : runs)
    if (const QuantizedView *amax = params.Get(std::min(other->param(), params.size() - 1))->view();
        other->endpoint() == run.endpoint() && other->mesh_rank() == run.mesh_rank() && amax &&
        amax->kind() == ViewKind::amax && amax->codes() == run.param()) {
      const auto reduced = reduced_.find(other->first() + (buffer - run.first()));
      if (reduced == reduced_.end() || !waits(step, reduced->second))
        return fail(step, " quantizes param '" + params.Get(view->codes())->name()->str() + "' (buffer " +
                              std::to_string(buffer) +
                              ") with a tensor scale, but does not wait for the step that computes it");
      return {};
    }
  return fail(step, " quantizes with a tensor scale that no step computes");
}

} // namespace reshard::verify
