#include "tools/gathered.h"

#include "schema/manifest.h"
#include "tools/vectors.h"

#include <algorithm>
#include <utility>

namespace reshard::tools {

using namespace schema;

std::string Gathered::fail(uint32_t step, const std::string &why) const {
  return "rank " + std::to_string(rank_) + " step " + std::to_string(step) + why;
}

bool Gathered::waits(uint32_t number, uint32_t earlier) {
  if (std::exchange(lookedAt_, number) != number) {
    const Step &step = *segment_->steps()->Get(number);
    after_.clear();
    for (uint32_t i = 0; i < step.after_count(); ++i)
      after_.push_back(segment_->after()->Get(step.first_after() + i));
    std::sort(after_.begin(), after_.end());
  }
  return std::binary_search(after_.begin(), after_.end(), earlier);
}

/// Whether the rank gathers rows of blocks.
bool Gathered::gathers() const {
  return std::any_of(all(segment_->buffers()).begin(), all(segment_->buffers()).end(), [&](const BufferRun *run) {
    const Face *face = plan_.manifest().endpoints()->Get(run->endpoint())->params()->Get(run->param())->face();
    return run->endpoint() > 0 && face && face->kind() == FaceKind::elements && face->gathered();
  });
}

/// Whether a step waits for a copy from the arena, or for a later one that waits for it.
bool Gathered::waitsForCopy(uint32_t step, uint32_t copy) {
  const auto from = std::find(copies_.begin(), copies_.end(), copy);
  return waits(step, copy) || std::any_of(from, copies_.end(), [&](uint32_t later) { return waits(step, later); });
}

std::string Gathered::forEachMove(uint32_t rank, const std::function<void(const Move &)> &visit) {
  rank_ = rank;
  lookedAt_ = UINT32_MAX;
  segment_ = &paired_.segment(rank);
  brought_.clear();
  quantised_.clear();
  largest_.clear();
  reduced_.clear();
  copies_.clear();
  std::string error;
  const bool anyGathered = gathers(); // else the arena has what it relays, which its sends say
  for (uint32_t s = 0; s < all(segment_->steps()).size() && error.empty(); ++s) {
    const Step &step = *segment_->steps()->Get(s);
    for (uint32_t i = 0; step.kind() == StepKind::reduce && i < step.input_count() && error.empty(); ++i) {
      const uint32_t buffer = segment_->operands()->Get(step.first_input() + i)->buffer();
      for (const uint32_t writer : largest_[buffer])
        if (!waits(s, writer))
          error = fail(s, " takes the largest of what step " + std::to_string(writer) +
                              " brings, and does not wait for it");
      reduced_[buffer] = s;
    }
    uint32_t last = 0; // most rows of a step go to few buffers
    const std::string problem = paired_.forEachMove(rank, s, [&](const Move &move) {
      const bool gathers = move.targetBuffer == 0, quantises = !gathers && move.sourceBuffer == 0 && !move.zero;
      if (gathers && !anyGathered)
        return;
      if (gathers && error.empty())
        error = write(s, move);
      else if (quantises && step.kind() == StepKind::recv && error.empty())
        error = relayed_.resolve(move, paired_.send(step.message()), visit);
      else if (quantises)
        forEachRow(move, [&](const Move &row) {
          if (error.empty())
            error = read(s, row, visit);
        });
      else if (error.empty())
        visit(move);
      if (!gathers && error.empty() && std::exchange(last, move.targetBuffer) != move.targetBuffer)
        error = scale(s, move.targetBuffer);
    });
    if (error.empty())
      error = problem;
    if (step.kind() == StepKind::copy && segment_->operands()->Get(step.first_input())->buffer() == 0) {
      if (!copies_.empty() && !waits(s, copies_.back()))
        copies_.clear(); // those before are not done when this one is
      copies_.push_back(s);
    }
  }
  if (error.empty() && !brought_.empty())
    error = fail(brought_.begin()->second.step,
                 " gathers bytes at " + std::to_string(brought_.begin()->first) + " that are never quantised");
  return error;
}

/// Bytes may be taken over when what stood there has been quantised, by a step that this waits for. That nothing is
/// brought twice is seen when it is quantised.
std::string Gathered::write(uint32_t step, const Move &move) {
  uint64_t begin = move.targetOffset, end = begin + move.rowBytes;
  for (const Move::Loop &loop : move.loops)
    (loop.target < 0 ? begin : end) += static_cast<uint64_t>((loop.count - 1) * loop.target);
  auto at = quantised_.upper_bound(begin);
  if (at != quantised_.begin() && std::prev(at)->second.end > begin)
    --at;
  for (; at != quantised_.end() && at->first < end; ++at)
    if (!waitsForCopy(step, at->second.step))
      return fail(step, " gathers over what step " + std::to_string(at->second.step) +
                            " quantises, and does not wait for it");
  brought_.emplace(begin, Brought{move, step, end});
  return {};
}

/// Whether what was brought and begins within a range makes up the range, each byte once.
bool Gathered::tiled(uint64_t begin, uint64_t end, uint64_t &missing) {
  Boxes boxes;
  for (auto at = brought_.lower_bound(begin); at != brought_.end() && at->first < end; ++at)
    if (at->second.end > end || !addTo(boxes, at->second.move))
      return false;
  boxes.finish();
  Cutter cutter(boxes, work_);
  const Cut cut = cutter.run({static_cast<int64_t>(begin), 0, 0, {{static_cast<int64_t>(end - begin), 1, 0, 0}}},
                             [](const Piece &) { return true; });
  if (cut == Cut::missing)
    missing = static_cast<uint64_t>(cutter.place());
  return cut == Cut::done && boxes.places() == static_cast<int64_t>(end - begin);
}

/// What goes beyond a range becomes rows; whether there was any with more than one.
bool Gathered::split(uint64_t begin, uint64_t end) {
  std::vector<Brought> whole;
  for (auto at = brought_.begin(); at != brought_.end() && at->first < end;) {
    const bool beyond =
        at->second.end > begin && (at->first < begin || at->second.end > end) && !at->second.move.loops.empty();
    if (beyond)
      whole.push_back(std::move(at->second));
    at = beyond ? brought_.erase(at) : std::next(at);
  }
  for (const Brought &brought : whole)
    forEachRow(brought.move, [&](const Move &row) {
      brought_.emplace(row.targetOffset, Brought{row, brought.step, row.targetOffset + row.rowBytes});
    });
  return !whole.empty();
}

std::string Gathered::read(uint32_t step, const Move &row, const std::function<void(const Move &)> &visit) {
  const uint64_t begin = row.sourceOffset, end = begin + row.rowBytes;
  uint64_t missing = end;
  if (!tiled(begin, end, missing) && !(split(begin, end) && tiled(begin, end, missing = end))) {
    for (const auto &[from, brought] : brought_)
      if (from < end && brought.end > begin && (from < begin || brought.end > end))
        return fail(step, " quantises a part of the bytes at " + std::to_string(from) + " that came together");
    return missing < end
               ? fail(step, " quantises bytes at " + std::to_string(missing) + " that nobody brought")
               : fail(step, " quantises bytes from " + std::to_string(begin) + " on of which some came twice");
  }
  for (auto at = brought_.lower_bound(begin); at != brought_.end() && at->first < end; at = brought_.erase(at)) {
    if (!waits(step, at->second.step))
      return fail(step,
                  " quantises what step " + std::to_string(at->second.step) + " brings, and does not wait for it");
    Move straight = at->second.move;
    straight.targetBuffer = row.targetBuffer;
    straight.targetOffset += row.targetOffset - begin;
    visit(straight);
  }
  // This step is the last that quantised the range.
  auto at = quantised_.upper_bound(begin);
  if (at != quantised_.begin() && std::prev(at)->second.end > begin)
    --at;
  while (at != quantised_.end() && at->first < end) {
    const auto [from, before] = *at;
    at = quantised_.erase(at);
    if (from < begin)
      quantised_[from] = {begin, before.step};
    if (before.end > end)
      at = quantised_.emplace(end, before).first;
  }
  quantised_[begin] = {end, step};
  return {};
}

/// Who writes elements of nvfp4 waits for the tensor scale; largest magnitudes are noted.
std::string Gathered::scale(uint32_t step, uint32_t buffer) {
  const auto &runs = all(segment_->buffers());
  const BufferRun &run = **std::prev(std::upper_bound(runs.begin(), runs.end(), buffer,
                                                      [](uint32_t b, const BufferRun *r) { return b < r->first(); }));
  const auto &params = *plan_.manifest().endpoints()->Get(run.endpoint())->params();
  const Face *face = params.Get(run.param())->face();
  if (!face)
    return {};
  if (face->kind() == FaceKind::amax)
    largest_[buffer].push_back(step);
  if (face->kind() != FaceKind::elements || face->format() != Quantization::nvfp4)
    return {};
  for (const BufferRun *other : runs)
    if (const Face *amax = params.Get(std::min(other->param(), params.size() - 1))->face();
        other->endpoint() == run.endpoint() && other->place() == run.place() && amax &&
        amax->kind() == FaceKind::amax && amax->codes() == run.param()) {
      const auto reduced = reduced_.find(other->first() + (buffer - run.first()));
      if (reduced == reduced_.end() || !waits(step, reduced->second))
        return fail(step, " quantises param '" + params.Get(face->codes())->name()->str() + "' (buffer " +
                              std::to_string(buffer) + ") with a tensor scale that it does not wait for");
      return {};
    }
  return fail(step, " quantises with a tensor scale that nobody makes");
}

} // namespace reshard::tools
