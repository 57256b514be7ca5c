#include "tools/gathered.h"

#include "schema/manifest.h"
#include "tools/vectors.h"

#include <algorithm>
#include <utility>

namespace reshard::tools {

using namespace schema;

std::string Gathered::fail(uint32_t step, const std::string &why) const { return "rank " + std::to_string(rank_) + " step " + std::to_string(step) + why; }

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

/// Whether a step waits for a copy from the arena, or for a later one that waits for it.
bool Gathered::waitsForCopy(uint32_t step, uint32_t copy) {
  const auto from = std::find(copies_.begin(), copies_.end(), copy);
  return waits(step, copy) || std::any_of(from, copies_.end(), [&](uint32_t later) { return waits(step, later); });
}

std::string Gathered::forEachMove(uint32_t rank, const std::function<void(const Move &)> &visit) {
  rank_ = rank;
  lookedAt_ = UINT32_MAX;
  segment_ = &paired_.segment(rank);
  arena_.clear();
  largest_.clear();
  reduced_.clear();
  copies_.clear();
  std::string error;
  for (uint32_t s = 0; s < all(segment_->steps()).size() && error.empty(); ++s) {
    const Step &step = *segment_->steps()->Get(s);
    for (uint32_t i = 0; step.kind() == StepKind::reduce && i < step.input_count() && error.empty(); ++i) {
      const uint32_t buffer = segment_->operands()->Get(step.first_input() + i)->buffer();
      for (const uint32_t writer : largest_[buffer])
        if (!waits(s, writer))
          error = fail(s, " takes the largest of what step " + std::to_string(writer) + " brings, and does not wait for it");
      reduced_[buffer] = s;
    }
    uint32_t last = 0; // most rows of a step go to few buffers
    const std::string problem = paired_.forEachMove(rank, s, [&](const Move &move) {
      const bool gathers = move.targetBuffer == 0, quantises = !gathers && move.sourceBuffer == 0 && !move.zero;
      if (gathers || quantises)
        forEachRow(move, [&](const Move &row) {
          if (error.empty())
            error = gathers ? write(s, row) : read(s, row, visit);
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
  for (const auto &[begin, piece] : arena_)
    if (error.empty() && piece.read < 0)
      error = fail(piece.step, " gathers bytes at " + std::to_string(begin) + " that are never quantised");
  return error;
}

/// Bytes may be taken over when what stood there has been quantised, by a step that this waits for.
std::string Gathered::write(uint32_t step, const Move &row) {
  const uint64_t begin = row.targetOffset, end = begin + row.rowBytes;
  auto at = arena_.lower_bound(begin);
  if (at != arena_.begin() && std::prev(at)->second.end > begin)
    --at;
  while (at != arena_.end() && at->first < end) {
    const auto [from, piece] = *at;
    if (piece.read < 0)
      return fail(step, " gathers over what step " + std::to_string(piece.step) + " brought and nobody has quantised");
    if (!waitsForCopy(step, static_cast<uint32_t>(piece.read)))
      return fail(step, " gathers over what step " + std::to_string(piece.read) + " quantises, and does not wait for it");
    at = arena_.erase(at);
    if (from < begin)
      arena_[from] = {begin, piece.row, piece.step, piece.read};
    if (piece.end > end)
      at = arena_.emplace(end, piece).first; // its row is of no use any more
  }
  arena_[begin] = {end, row, step};
  return {};
}

std::string Gathered::read(uint32_t step, const Move &row, const std::function<void(const Move &)> &visit) {
  const uint64_t begin = row.sourceOffset, end = begin + row.rowBytes;
  for (uint64_t next = begin; next < end;) {
    auto at = arena_.upper_bound(next);
    if (at == arena_.begin() || (--at)->second.end <= next || at->second.read >= 0)
      return fail(step, " quantises bytes at " + std::to_string(next) + " that nobody brought");
    Piece &piece = at->second;
    if (at->first != next || piece.end > end)
      return fail(step, " quantises a part of the bytes at " + std::to_string(at->first) + " that came together");
    if (!waits(step, piece.step))
      return fail(step, " quantises what step " + std::to_string(piece.step) + " brings, and does not wait for it");
    Move straight = piece.row;
    straight.targetBuffer = row.targetBuffer;
    straight.targetOffset = row.targetOffset + (next - begin);
    visit(straight);
    piece.read = step;
    next = piece.end;
  }
  return {};
}

/// Who writes elements of nvfp4 waits for the tensor scale; largest magnitudes are noted.
std::string Gathered::scale(uint32_t step, uint32_t buffer) {
  const auto &runs = all(segment_->buffers());
  const BufferRun &run = **std::prev(std::upper_bound(runs.begin(), runs.end(), buffer, [](uint32_t b, const BufferRun *r) { return b < r->first(); }));
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
        other->endpoint() == run.endpoint() && other->place() == run.place() && amax && amax->kind() == FaceKind::amax && amax->codes() == run.param()) {
      const auto reduced = reduced_.find(other->first() + (buffer - run.first()));
      if (reduced == reduced_.end() || !waits(step, reduced->second))
        return fail(step, " quantises param '" + params.Get(face->codes())->name()->str() + "' (buffer " + std::to_string(buffer) + ") with a tensor scale that it does not wait for");
      return {};
    }
  return fail(step, " quantises with a tensor scale that nobody makes");
}

} // namespace reshard::tools
