// SPDX-License-Identifier: Apache-2.0
// Makes the time line of the page from a simulation: one rank of each group, with few spans and few points of its
// arena.
#include "report/page/times.h"

#include "command/common.h"
#include "executor/load/load.h"
#include "report/page/arena.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>

namespace reshard::report {

using namespace command;

using Json = nlohmann::ordered_json;

namespace {

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

/// The rank of each group whose last activity ends last.
std::vector<int32_t> drawnRanks(const Simulation &simulation, uint32_t world, uint32_t group) {
  std::vector<double> busy(world);
  simulation.forEachActivity([&](const Activity &activity) {
    busy[activity.rank] = std::max(busy[activity.rank], activity.end);
    if (activity.peer >= 0)
      busy[activity.peer] = std::max(busy[activity.peer], activity.end);
  });
  std::vector<int32_t> ranks;
  for (uint32_t first = 0; first < world; first += group)
    ranks.push_back(static_cast<int32_t>(
        std::max_element(busy.begin() + first, busy.begin() + std::min(world, first + group)) - busy.begin()));
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
      return times.copies.push_back(&activity);
    }
  }
};

Json laneOf(const Plan &plan, int32_t rank, const RankLane &lane, double seconds) {
  std::shared_ptr<const schema::Segment> segment;
  throwOnError(plan.segment(static_cast<uint32_t>(rank), segment), kUsage);
  Json spans = Json::array(), arena = Json::array();
  for (const Span &span : spansOf(rank, lane.activities, seconds))
    spans.push_back({span.kind, nanoseconds(span.begin), nanoseconds(span.end - span.begin), span.peer, span.bytes});
  uint64_t most = 0;
  const std::vector<ArenaPoint> history = arenaOverTime(plan.manifest(), *segment, lane.times, seconds);
  for (const ArenaPoint &use : history)
    most = std::max(most, use.bytes);
  for (const ArenaPoint &use : thinned(history, seconds))
    arena.push_back({nanoseconds(use.seconds), use.bytes});
  return {{"rank", rank},
          {"spans", std::move(spans)},
          {"limit", segment->arena_bytes()},
          {"most", most},
          {"arena", std::move(arena)}};
}

} // namespace

nlohmann::ordered_json timesOf(const Plan &plan, const Topology &topology, uint32_t group) {
  ProgressLine progress("simulate");
  const Result<Simulation> simulated = simulate(plan, topology, [&](double fraction) { progress.at(fraction); });
  throwOnError(simulated.status(), kUsage);
  const std::vector<int32_t> ranks = drawnRanks(*simulated, plan.world(), group);
  std::map<int32_t, RankLane> byRank;
  for (const int32_t rank : ranks)
    byRank[rank];
  simulated->forEachActivity([&](const Activity &activity) {
    if (const auto at = byRank.find(activity.rank); at != byRank.end())
      at->second.add(activity);
    if (const auto at = byRank.find(activity.peer);
        at != byRank.end() && activity.kind == Activity::Kind::transmit) // the receiver has it too
      at->second.add(activity);
  });
  Json lanes = Json::array(), terms = Json::object();
  for (const auto &[rank, lane] : byRank)
    lanes.push_back(laneOf(plan, rank, lane, simulated->seconds));
  for (const LowerBoundTerm &term : simulated->lowerBound)
    terms[term.name] = term.seconds;
  return {{"seconds", simulated->seconds},
          {"bound", simulated->lowerBound.empty() ? Json() : Json(simulated->lowerBoundSeconds)},
          {"terms", terms},
          {"lanes", lanes}};
}

} // namespace reshard::report
