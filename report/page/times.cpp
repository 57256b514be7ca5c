// SPDX-License-Identifier: Apache-2.0
// Makes the time line of the page from a simulation: one rank of each group, with few spans and few points of its
// arena.
#include "base/work_deadline.h"
#include "command/common.h"
#include "executor/memory/chunks.h"
#include "report/page/page.h"
#include "report/simulate/simulate.h"
#include "schema/flatbuffer_vectors.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>

namespace reshard::report {

using namespace command;

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

/// The activities of one message, by chunk.
struct MessageTimes {
  std::vector<const Activity *> pack, transmit, unpack;
};

/// The activities of one rank.
struct RankTimes {
  std::unordered_map<uint32_t, MessageTimes> messages;   // sent or received ones
  std::unordered_map<uint32_t, const Activity *> copies; // its other steps
};

/// Bytes in use from a time on.
struct ArenaPoint {
  double seconds;
  uint64_t bytes;
};

/// The bytes of a rank's arena that are in use, from time 0 to `end`, where the last entry is. In use are
/// - a chunk of a staged message: of a send, from the begin of its packing until its bytes are sent; of a receive, from
///   the begin of its transmission until it is unpacked;
/// - relayed bytes and elements that are staged for quantization: from the begin of the message or copy that brings
///   them until the last step that reads them has done so;
/// - the memory of quantized views and of transformed params: always.
class Arena {
public:
  Arena(const Manifest &manifest, const Segment &segment, const RankTimes &times, double end)
      : segment_(segment), times_(times), end_(end) {
    for (const BufferRange *range : orEmpty(segment.buffers()))
      if (inArena(*manifest.endpoints()->Get(range->endpoint())->params()->Get(range->param())))
        hold(0, end, range->count() * stagedBytes(*range));
  }

  std::vector<ArenaPoint> history() {
    const auto &steps = orEmpty(segment_.steps());
    for (uint32_t number = 0; number < steps.size(); ++number) {
      const Step *const step = steps.Get(number);
      if (step->kind() == StepKind::send)
        send(*step, times_.messages.at(step->message()));
      else if (step->kind() == StepKind::recv)
        receive(*step, times_.messages.at(step->message()));
      else {
        const Activity &copy = *times_.copies.at(number);
        forEachOperand(step->first_input(), step->input_count(), [&](const Range &range) { read(range, copy.end); });
        forEachOperand(step->first_output(), step->output_count(),
                       [&](const Range &range) { write(range, copy.begin); });
      }
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

constexpr size_t kSpans = 240;       // for a rank
constexpr size_t kArenaPoints = 240; // for a rank

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

/// The number of a kind of span: as Activity::Kind, or kReceive for a transmission to the rank.
constexpr int kReceive = 4;

/// Activities of one kind that follow each other closely.
struct Span {
  int kind;
  double begin, end;
  int32_t peer;
  uint64_t bytes;
};

/// The spans of a rank; close ones of one kind are joined if there are too many.
std::vector<Span> spansOf(int32_t rank, std::vector<const Activity *> activities, double seconds) {
  std::sort(activities.begin(), activities.end(),
            [](const Activity *a, const Activity *b) { return a->begin < b->begin; });
  std::vector<Span> spans;
  for (double gap = 0;; gap = gap == 0 ? seconds / 1000 : gap * 2) {
    spans.clear();
    std::map<int, size_t> last; // the last span of each kind
    for (const Activity *activity : activities) {
      const bool receives = activity->rank != rank;
      const int kind = receives ? kReceive : static_cast<int>(activity->kind);
      const int32_t peer = receives ? activity->rank : activity->peer;
      const auto at = last.find(kind);
      if (gap > 0 && at != last.end() && activity->begin - spans[at->second].end <= gap) {
        Span &span = spans[at->second];
        span.end = std::max(span.end, activity->end);
        span.bytes += activity->bytes;
        span.peer = span.peer == peer ? span.peer : -1;
      } else {
        last[kind] = spans.size();
        spans.push_back({kind, activity->begin, activity->end, peer, activity->bytes});
      }
    }
    if (spans.size() <= kSpans || gap > seconds)
      return spans;
  }
}

/// Downsamples a history to kArenaPoints, keeping each interval's maximum.
std::vector<ArenaPoint> thinned(const std::vector<ArenaPoint> &history, double seconds) {
  if (history.size() <= kArenaPoints)
    return history;
  std::vector<ArenaPoint> result;
  size_t at = 0;
  for (size_t i = 0; i < kArenaPoints; ++i) {
    const double begin = seconds * static_cast<double>(i) / kArenaPoints,
                 end = seconds * static_cast<double>(i + 1) / kArenaPoints;
    uint64_t most = history[at].bytes; // in use at the begin of the interval
    while (at + 1 < history.size() && history[at + 1].seconds < end)
      most = std::max(most, history[++at].bytes);
    if (result.empty() || result.back().bytes != most)
      result.push_back({begin, most});
  }
  result.push_back({seconds, history.back().bytes});
  return result;
}

/// The seconds in which a rank's busiest resource is in use: its links or its NIC in one direction, or its copies.
Result<double> busySeconds(const Plan &plan, const Topology &topology, uint32_t rank) {
  std::shared_ptr<const Segment> segment;
  if (Status status = plan.segment(rank, segment); !status.ok())
    return status;
  double copying = 0, moving[2][2] = {}; // by whether inside a node, and whether it sends
  for (const Step *step : orEmpty(segment->steps())) {
    WorkDeadline::spend(1);
    const bool sends = step->kind() == StepKind::send, message = sends || step->kind() == StepKind::recv;
    const auto bytes = static_cast<double>(step->bytes());
    if (!message || step->staging() != UINT64_MAX)
      copying += bytes / static_cast<double>(topology.copyRate);
    if (!message)
      continue;
    const bool local = topology.node(rank) == topology.node(step->peer());
    moving[local][sends] += bytes / static_cast<double>(local ? topology.linkRate : topology.nicRate);
  }
  return std::max({copying, moving[0][0], moving[0][1], moving[1][0], moving[1][1]});
}

/// The busiest rank of each group.
Result<std::vector<uint32_t>> drawnRanks(const Plan &plan, const Topology &topology, uint32_t group) {
  std::vector<uint32_t> ranks;
  for (uint32_t first = 0; first < plan.world(); first += group) {
    ranks.push_back(first);
    double most = 0;
    for (uint32_t rank = first; group > 1 && rank < std::min(plan.world(), first + group); ++rank) {
      const Result<double> busy = busySeconds(plan, topology, rank);
      if (!busy.ok())
        return busy.status();
      if (*busy > most) {
        most = *busy;
        ranks.back() = rank;
      }
    }
  }
  return ranks;
}

/// The activities in which one rank takes part.
struct RankLane {
  std::deque<Activity> own; // a deque does not move them: all pointers below are to its elements
  std::vector<const Activity *> activities;
  RankTimes times;

  void add(const Activity &added) {
    const Activity &activity = own.emplace_back(added);
    activities.push_back(&activity);
    switch (activity.kind) {
    case Activity::Kind::pack:
      return times.messages[activity.message].pack.push_back(&activity);
    case Activity::Kind::transmit:
      return times.messages[activity.message].transmit.push_back(&activity);
    case Activity::Kind::unpack:
      return times.messages[activity.message].unpack.push_back(&activity);
    case Activity::Kind::copy:
      times.copies[activity.step] = &activity;
    }
  }
};

Result<Json> laneOf(const Plan &plan, int32_t rank, const RankLane &lane, double seconds) {
  std::shared_ptr<const Segment> segment;
  if (Status status = plan.segment(static_cast<uint32_t>(rank), segment); !status.ok())
    return status;
  Json spans = Json::array(), arena = Json::array();
  for (const Span &span : spansOf(rank, lane.activities, seconds))
    spans.push_back({span.kind, nanoseconds(span.begin), nanoseconds(span.end - span.begin), span.peer, span.bytes});
  uint64_t most = 0;
  const std::vector<ArenaPoint> history = Arena(plan.manifest(), *segment, lane.times, seconds).history();
  for (const ArenaPoint &use : history)
    most = std::max(most, use.bytes);
  for (const ArenaPoint &use : thinned(history, seconds))
    arena.push_back({nanoseconds(use.seconds), use.bytes});
  return Json{{"rank", rank},
              {"spans", std::move(spans)},
              {"limit", segment->arena_bytes()},
              {"most", most},
              {"arena", std::move(arena)}};
}

} // namespace

Result<Json> timesOf(const Plan &plan, const Topology &topology, uint32_t group) {
  ProgressLine progress("simulate");
  const Result<std::vector<uint32_t>> ranks = drawnRanks(plan, topology, group);
  if (!ranks.ok())
    return ranks.status();
  std::map<int32_t, RankLane> byRank;
  for (const uint32_t rank : *ranks)
    byRank[static_cast<int32_t>(rank)];
  auto keep = [&](const Activity &activity) {
    if (const auto at = byRank.find(activity.rank); at != byRank.end())
      at->second.add(activity);
    if (const auto at = byRank.find(activity.peer);
        at != byRank.end() && activity.kind == Activity::Kind::transmit) // the receiver has it too
      at->second.add(activity);
  };
  const Result<Simulation> simulated = simulate(plan, topology, [&](double fraction) { progress.at(fraction); }, keep);
  if (!simulated.ok())
    return simulated.status();
  Json lanes = Json::array(), terms = Json::object();
  for (const auto &[rank, lane] : byRank) {
    Result<Json> drawn = laneOf(plan, rank, lane, simulated->seconds);
    if (!drawn.ok())
      return drawn;
    lanes.push_back(std::move(*drawn));
  }
  if (simulated->lowerBound)
    for (const LowerBoundTerm &term : simulated->lowerBound->terms)
      terms[term.name] = term.seconds;
  return Json{{"seconds", simulated->seconds},
              {"bound", simulated->lowerBound ? Json(simulated->lowerBound->seconds) : Json()},
              {"terms", terms},
              {"lanes", lanes}};
}

} // namespace reshard::report
