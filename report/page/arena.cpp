// SPDX-License-Identifier: Apache-2.0
#include "report/page/arena.h"

#include "base/work_deadline.h"
#include "executor/memory/chunks.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <map>
#include <optional>

namespace reshard::report {

using namespace schema;

namespace {

class Arena {
public:
  Arena(const Manifest &manifest, const Segment &segment, const RankTimes &times, double end)
      : segment_(segment), times_(times), end_(end) {
    for (const BufferRange *range : orEmpty(segment.buffers()))
      if (inArena(*manifest.endpoints()->Get(range->endpoint())->params()->Get(range->param())))
        hold(0, end, range->count() * stagedBytes(*range));
  }

  std::vector<ArenaPoint> history() {
    auto copy = times_.copies.begin();
    for (const Step *step : orEmpty(segment_.steps()))
      if (step->kind() == StepKind::send)
        send(*step, times_.messages.at(step->message()));
      else if (step->kind() == StepKind::recv)
        receive(*step, times_.messages.at(step->message()));
      else {
        forEachOperand(step->first_input(), step->input_count(),
                       [&](const Range &range) { read(range, (*copy)->end); });
        forEachOperand(step->first_output(), step->output_count(),
                       [&](const Range &range) { write(range, (*copy)->begin); });
        ++copy;
      }
    for (const auto &[begin, held] : held_)
      hold(held.from, held.until.value_or(end_), held.bytes);
    std::vector<ArenaPoint> history{{0, 0}};
    int64_t bytes = 0;
    for (const auto &[seconds, change] : changes_) {
      bytes += change;
      if (history.back().seconds != seconds)
        history.push_back({seconds, 0});
      history.back().bytes = static_cast<uint64_t>(bytes);
    }
    if (history.back().seconds < end_)
      history.push_back({end_, history.back().bytes});
    return history;
  }

private:
  /// A range of the arena that an operand uses. Its rows may have gaps.
  struct Range {
    uint64_t begin, end, bytes;
  };
  /// Bytes that a step wrote into the arena. Steps that read them follow.
  struct Held {
    uint64_t end, bytes;
    double from;
    std::optional<double> until; // the end of the last step so far that reads some of them
  };

  void send(const Step &step, const MessageTimes &times) {
    const bool staged = step.staging() != UINT64_MAX;
    for (uint64_t c = 0; staged && c < chunkCount(step); ++c)
      hold(times.pack[c]->begin, times.transmit[c]->end, chunkBytes(step, c));
    forEachOperand(step.first_input(), step.input_count(),
                   [&](const Range &range) { read(range, (staged ? times.pack : times.transmit).back()->end); });
  }

  void receive(const Step &step, const MessageTimes &times) {
    const bool staged = step.staging() != UINT64_MAX;
    for (uint64_t c = 0; staged && c < chunkCount(step); ++c)
      hold(times.transmit[c]->begin, times.unpack[c]->end, chunkBytes(step, c));
    forEachOperand(step.first_output(), step.output_count(),
                   [&](const Range &range) { write(range, (staged ? times.unpack : times.transmit).front()->begin); });
  }

  template <class Visit> void forEachOperand(uint32_t first, uint32_t count, Visit visit) const {
    for (uint32_t i = first; i < first + count; ++i) {
      WorkDeadline::spend(8);
      const Operand &operand = *segment_.operands()->Get(i);
      if (operand.buffer() != 0)
        continue;
      const Shape &shape = *segment_.shapes()->Get(operand.shape());
      Range range{operand.offset(), operand.offset() + shape.row_bytes(), shape.row_bytes()};
      for (uint32_t l = 0; l < shape.loop_count(); ++l) {
        const Loop &loop = *segment_.loops()->Get(shape.first_loop() + l);
        range.bytes *= loop.count();
        (loop.stride() < 0 ? range.begin : range.end) += (loop.count() - 1) * static_cast<uint64_t>(loop.stride());
      }
      visit(range);
    }
  }

  template <class Visit> void forEachHeld(const Range &range, Visit visit) {
    auto at = held_.lower_bound(range.begin - std::min(range.begin, longest_));
    while (at != held_.end() && at->first < range.end) {
      WorkDeadline::spend(1);
      const auto next = std::next(at);
      if (at->second.end > range.begin)
        visit(at);
      at = next;
    }
  }

  void read(const Range &range, double until) {
    forEachHeld(range, [&](auto at) { at->second.until = std::max(at->second.until.value_or(0), until); });
  }

  /// Elements of one phase arrive in ranges that interleave, before any of them is read. So bytes that were read are
  /// those of an earlier phase, which this range replaces.
  void write(const Range &range, double from) {
    forEachHeld(range, [&](auto at) {
      if (!at->second.until)
        return;
      hold(at->second.from, *at->second.until, at->second.bytes);
      held_.erase(at);
    });
    held_.emplace(range.begin, Held{range.end, range.bytes, from, std::nullopt});
    longest_ = std::max(longest_, range.end - range.begin);
  }

  void hold(double from, double until, uint64_t bytes) {
    changes_[from] += static_cast<int64_t>(bytes);
    changes_[std::max(from, until)] -= static_cast<int64_t>(bytes);
  }

  const Segment &segment_;
  const RankTimes &times_;
  const double end_;
  std::multimap<uint64_t, Held> held_; // by the begin of its range
  uint64_t longest_ = 0;               // range in held_
  std::map<double, int64_t> changes_;  // by how much the bytes in use change, by time
};

} // namespace

std::vector<ArenaPoint> arenaOverTime(const Manifest &manifest, const Segment &segment, const RankTimes &times,
                                      double end) {
  return Arena(manifest, segment, times, end).history();
}

} // namespace reshard::report
