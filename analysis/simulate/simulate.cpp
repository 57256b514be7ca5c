// SPDX-License-Identifier: Apache-2.0
#include "analysis/simulate/simulate.h"

#include "analysis/verify/plan_verifier.h"
#include "analysis/work_deadline.h"
#include "executor/chunks.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

namespace reshard::analysis {

namespace {

using namespace schema;

/// Flows that share resources by max-min fairness. Time advances from the end of one flow to the next.
class Flows {
public:
  uint32_t resource(double rate) {
    resources_.push_back({rate, {}, 0, 0, 0});
    return static_cast<uint32_t>(resources_.size() - 1);
  }

  double now() const { return now_; }
  /// Seconds that a resource was in use.
  double busy(uint32_t resource) const { return resources_[resource].busy; }

  /// Starts a flow of `bytes` through one or two resources; next() returns its `id` when it ends.
  void start(uint32_t id, double bytes, uint32_t first, uint32_t second) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(flows_.size()));
      flows_.emplace_back();
    }
    const uint32_t number = free_.back();
    free_.pop_back();
    Flow &flow = flows_[number];
    flow.id = id;
    flow.left = bytes;
    flow.rate = 0;
    flow.since = now_;
    flow.resources = {first, second};
    flow.count = first == second ? 1 : 2;
    for (uint32_t i = 0; i < flow.count; ++i) {
      Resource &resource = resources_[flow.resources[i]];
      if (resource.flows.empty())
        resource.since = now_;
      resource.flows.push_back(number);
    }
    updateRates(flow);
  }

  /// Sets a timer: next() returns `id` at that time.
  void at(double time, uint32_t id) { events_.push({time, id, kTimer, 0}); }

  /// Advances to the next end of a flow or timer; returns false if there is none.
  bool next(uint32_t &id, bool &timer) {
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      timer = event.flow == kTimer;
      if (!timer && flows_[event.flow].version != event.version)
        continue;
      now_ = event.time;
      id = event.id;
      if (!timer)
        finish(event.flow);
      return true;
    }
    return false;
  }

private:
  struct Resource {
    double rate;
    std::vector<uint32_t> flows;
    double busy, since;
    uint64_t seen = 0; // the last update that found it
  };
  /// Flows that ended are used again, so that those in the memory caches are few.
  struct Flow {
    double left = 0, rate = 0, since = 0, newRate = 0;
    uint32_t id = 0, version = 0, count = 0;
    std::array<uint32_t, 2> resources{};
    uint64_t seen = 0;
  };
  static constexpr uint32_t kTimer = UINT32_MAX;
  struct Event {
    double time;
    uint32_t id, flow, version;
    bool operator<(const Event &other) const { return std::tie(time, id) > std::tie(other.time, other.id); }
  };

  void finish(uint32_t number) {
    Flow &flow = flows_[number];
    ++flow.version;
    for (uint32_t i = 0; i < flow.count; ++i) {
      Resource &resource = resources_[flow.resources[i]];
      std::erase(resource.flows, number);
      if (resource.flows.empty())
        resource.busy += now_ - resource.since;
    }
    updateRates(flow);
    free_.push_back(number);
  }

  /// Computes new rates for all flows that compete, directly or indirectly, for the resources of a flow: the most
  /// contended resource first (progressive filling).
  void updateRates(const Flow &changed) {
    ++update_;
    competing_.clear();
    contended_.clear();
    auto contend = [&](const Flow &flow) {
      for (uint32_t i = 0; i < flow.count; ++i)
        if (std::exchange(resources_[flow.resources[i]].seen, update_) != update_)
          contended_.push_back(flow.resources[i]);
    };
    contend(changed);
    for (size_t i = 0; i < contended_.size(); ++i)
      for (const uint32_t f : resources_[contended_[i]].flows) {
        WorkDeadline::spend(1);
        if (std::exchange(flows_[f].seen, update_) == update_)
          continue;
        competing_.push_back(f);
        flows_[f].newRate = -1;
        contend(flows_[f]);
      }
    for (size_t open = competing_.size(); open > 0;) {
      double least = INFINITY;
      uint32_t tightest = 0;
      for (const uint32_t r : contended_) {
        WorkDeadline::spend(1 + static_cast<int64_t>(resources_[r].flows.size()));
        double rest = resources_[r].rate;
        int sharing = 0;
        for (const uint32_t f : resources_[r].flows)
          flows_[f].newRate < 0 ? ++sharing : rest -= flows_[f].newRate;
        if (sharing > 0 && rest / sharing < least) {
          least = rest / sharing;
          tightest = r;
        }
      }
      for (const uint32_t f : resources_[tightest].flows)
        if (flows_[f].newRate < 0) {
          flows_[f].newRate = least;
          --open;
        }
    }
    for (const uint32_t f : competing_) {
      Flow &flow = flows_[f];
      if (flow.newRate == flow.rate)
        continue; // its end is known
      flow.left = std::max(0.0, flow.left - flow.rate * (now_ - flow.since));
      flow.since = now_;
      flow.rate = flow.newRate;
      events_.push({now_ + flow.left / flow.rate, flow.id, f, ++flow.version});
    }
  }

  std::vector<Resource> resources_;
  std::vector<Flow> flows_;
  std::vector<uint32_t> free_; // of flows_
  std::priority_queue<Event> events_;
  double now_ = 0;
  uint64_t update_ = 0;                         // the number of updates
  std::vector<uint32_t> competing_, contended_; // flows and resources of one update
};

class Simulator {
public:
  Simulator(const Plan &plan, const Topology &topology, bool keep, const std::function<void(double)> &progress)
      : plan_(plan), topology_(topology), keep_(keep), progress_(progress) {}

  Result<Simulation> run() {
    const uint32_t world = plan_.world();
    std::vector<std::shared_ptr<const Segment>> segments(world);
    for (uint32_t rank = 0; rank < world; ++rank) {
      WorkDeadline::spend(1024);
      if (Status status = plan_.segment(rank, segments[rank]); !status.ok())
        return status;
    }
    if (Status status = checkMessages(plan_); !status.ok())
      return status;
    for (uint32_t rank = 0; rank < world; ++rank) {
      copies_.push_back(flows_.resource(static_cast<double>(topology_.copyRate)));
      for (auto &side : links_)
        side.push_back(flows_.resource(static_cast<double>(topology_.linkRate)));
      while (nics_[0].size() <= static_cast<size_t>(topology_.nic(rank)))
        for (auto &side : nics_)
          side.push_back(flows_.resource(static_cast<double>(topology_.nicRate)));
    }
    build(segments);
    for (uint32_t a = 0; a < tasks_.size(); ++a)
      if (tasks_[a].waits == 0)
        start(a);
    uint32_t done = 0;
    bool timer = false;
    while (flows_.next(done, timer)) {
      if (!timer)
        ended(done, false);
      if (!timer && tasks_[done].delay > 0)
        flows_.at(flows_.now() + tasks_[done].delay, done);
      else
        ended(done, true);
      if (finished_ % 1024 == 0)
        progress_(static_cast<double>(finished_) / static_cast<double>(tasks_.size()));
    }
    if (finished_ != tasks_.size())
      return failed("deadlock: only " + std::to_string(finished_) + " of " + std::to_string(tasks_.size()) +
                    " activities can finish, the others wait for each other");
    report();
    return std::move(result_);
  }

private:
  static constexpr uint32_t kNone = UINT32_MAX;

  /// A list in edges_, in the order of after().
  struct Waiting {
    uint32_t first = kNone, last = kNone;
  };
  /// An activity and its dependents. It releases its resources when its bytes are sent (released); the bytes arrive one
  /// latency later (arrived).
  struct Task {
    Activity activity;
    uint32_t first = 0, second = 0; // resources
    double delay = 0;               // seconds from released to arrived
    uint32_t waits = 0;
    Waiting released, arrived; // tasks that wait for these events
  };
  struct Edge {
    uint32_t task, next;
  };

  uint32_t add(Activity activity, uint32_t first, uint32_t second, double delay = 0) {
    Task task;
    task.activity = activity;
    task.first = first;
    task.second = second;
    task.delay = delay;
    tasks_.push_back(std::move(task));
    return static_cast<uint32_t>(tasks_.size() - 1);
  }

  void after(uint32_t before, bool arrived, uint32_t task) {
    Waiting &waiting = arrived ? tasks_[before].arrived : tasks_[before].released;
    const auto edge = static_cast<uint32_t>(edges_.size());
    (waiting.first == kNone ? waiting.first : edges_[waiting.last].next) = edge;
    waiting.last = edge;
    edges_.push_back({task, kNone});
    ++tasks_[task].waits;
  }

  /// The tasks of one chunk of a message.
  struct Tasks {
    uint32_t pack = kNone, transmit = kNone, unpack = kNone;
    /// The task that ends when the chunk has arrived.
    uint32_t last() const { return unpack != kNone ? unpack : transmit; }
  };
  using Chunks = std::vector<Tasks>;

  void build(const std::vector<std::shared_ptr<const Segment>> &segments) {
    std::vector<Chunks> messages(plan_.manifest().messages());
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      for (const Step *step : orEmpty(segments[rank]->steps())) {
        Activity activity{Activity::Kind::copy, static_cast<int32_t>(rank), -1, step->message(), step->round(),
                          step->bytes()};
        if (step->kind() != StepKind::send) {
          if (step->kind() != StepKind::recv)
            local_[{rank, step}] = add(activity, copies_[rank], copies_[rank]);
          continue;
        }
        Chunks &chunks = messages[step->message()];
        chunks.resize(chunkCount(*step));
        const bool local = topology_.node(rank) == topology_.node(step->peer());
        activity.peer = static_cast<int32_t>(step->peer());
        for (uint64_t c = 0; c < chunks.size(); ++c) {
          activity.bytes = chunkBytes(*step, c);
          activity.kind = Activity::Kind::transmit;
          chunks[c].transmit = local
                                   ? add(activity, links_[0][rank], links_[1][step->peer()],
                                         static_cast<double>(topology_.linkLatency) * 1e-9)
                                   : add(activity, nics_[0][topology_.nic(rank)], nics_[1][topology_.nic(step->peer())],
                                         static_cast<double>(topology_.nicLatency) * 1e-9);
          if (step->staging() == UINT64_MAX)
            continue;
          activity.kind = Activity::Kind::pack;
          chunks[c].pack = add(activity, copies_[rank], copies_[rank]);
          after(chunks[c].pack, true, chunks[c].transmit);
        }
      }
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      for (const Step *step : orEmpty(segments[rank]->steps()))
        if (step->kind() == StepKind::recv && step->staging() != UINT64_MAX)
          for (uint64_t c = 0; c < chunkCount(*step); ++c) {
            Tasks &tasks = messages[step->message()][c];
            tasks.unpack = add({Activity::Kind::unpack, static_cast<int32_t>(rank), static_cast<int32_t>(step->peer()),
                                step->message(), step->round(), chunkBytes(*step, c)},
                               copies_[rank], copies_[rank]);
            after(tasks.transmit, true, tasks.unpack);
          }
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      order(rank, *segments[rank], messages);
  }

  /// Adds the dependencies of a rank's chunks: on the previous chunk of the same tier and direction, on its packing or
  /// unpacking, on the arena slot that was used two chunks ago, on the arrival of relayed bytes, and on the copies that
  /// read the bytes of the arena that a receive replaces; and those of its copies.
  void order(uint32_t rank, const Segment &segment, const std::vector<Chunks> &messages) {
    struct Sequence {
      uint32_t last = kNone, copying = kNone; // the previous transmission; the previous packing or unpacking
      uint32_t slots[2] = {kNone, kNone};     // the task that frees each slot
      size_t staged = 0;
    } sequences[2][2];
    for (const Step *step : orEmpty(segment.steps())) {
      const bool send = step->kind() == StepKind::send;
      if (!send && step->kind() != StepKind::recv) {
        followLocally(rank, segment, *step, messages);
        continue;
      }
      const Chunks &chunks = messages[step->message()];
      Sequence &sequence = sequences[send][topology_.node(rank) == topology_.node(step->peer())];
      for (const Tasks &tasks : chunks) {
        if (sequence.last != kNone)
          after(sequence.last, false, tasks.transmit);
        sequence.last = tasks.transmit;
        const uint32_t copying = send ? tasks.pack : tasks.unpack;
        if (copying == kNone)
          continue;
        if (sequence.copying != kNone)
          after(sequence.copying, true, copying);
        sequence.copying = copying;
        uint32_t &slot = sequence.slots[sequence.staged++ % 2];
        if (slot != kNone)
          after(slot, !send, send ? copying : tasks.transmit);
        slot = send ? tasks.transmit : copying;
      }
      if (send && step->after_count() > 0)
        follow(rank, segment, *step, messages);
      for (uint32_t i = 0; !send && i < step->after_count(); ++i) { // before its bytes of the arena are reused
        const Step &earlier = *segment.steps()->Get(segment.after()->Get(step->first_after() + i));
        const bool sent = earlier.kind() == StepKind::send; // relayed bytes; else elements that a copy quantizes
        if (earlier.kind() != StepKind::recv)
          for (const Tasks &tasks : chunks)
            after(sent ? messages[earlier.message()].back().transmit : local_.at({rank, &earlier}), !sent,
                  tasks.transmit);
      }
    }
  }

  /// Adds the dependencies of a step that neither sends nor receives.
  void followLocally(uint32_t rank, const Segment &segment, const Step &step, const std::vector<Chunks> &messages) {
    const uint32_t task = local_.at({rank, &step});
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const Step &earlier = *segment.steps()->Get(segment.after()->Get(step.first_after() + i));
      if (earlier.kind() == StepKind::recv)
        after(messages[earlier.message()].back().last(), true, task);
      else if (earlier.kind() == StepKind::send)
        after(messages[earlier.message()].back().transmit, false, task);
      else
        after(local_.at({rank, &earlier}), true, task);
    }
  }

  /// Adds the dependencies of a send on the steps that provide its bytes.
  void follow(uint32_t rank, const Segment &segment, const Step &send, const std::vector<Chunks> &messages) {
    const Chunks &chunks = messages[send.message()];
    const std::vector<std::vector<uint64_t>> before = chunksBefore(segment, send);
    for (uint32_t i = 0; i < send.after_count(); ++i) {
      const Step &earlier = *segment.steps()->Get(segment.after()->Get(send.first_after() + i));
      for (size_t c = 0; c < chunks.size(); ++c)
        if (before[i][c] > 0)
          after(earlier.kind() == StepKind::recv ? messages[earlier.message()][before[i][c] - 1].last()
                                                 : local_.at({rank, &earlier}),
                true, chunks[c].pack != kNone ? chunks[c].pack : chunks[c].transmit);
    }
  }

  void start(uint32_t number) {
    Task &task = tasks_[number];
    task.activity.begin = flows_.now();
    flows_.start(number, static_cast<double>(task.activity.bytes), task.first, task.second);
  }

  void ended(uint32_t number, bool arrived) {
    Task &task = tasks_[number];
    if (!arrived) {
      task.activity.end = flows_.now();
    } else {
      ++finished_;
      result_.seconds = std::max(result_.seconds, flows_.now());
    }
    for (uint32_t edge = (arrived ? task.arrived : task.released).first; edge != kNone; edge = edges_[edge].next)
      if (--tasks_[edges_[edge].task].waits == 0)
        start(edges_[edge].task);
  }

  void report() {
    auto most = [&](const std::vector<uint32_t> *sides, int64_t &which, double &seconds) {
      for (size_t i = 0; i < sides[0].size(); ++i)
        for (int side = 0; side < 2; ++side)
          if (flows_.busy(sides[side][i]) > seconds) {
            seconds = flows_.busy(sides[side][i]);
            which = static_cast<int64_t>(i);
          }
    };
    result_.busiestNic = -1;
    most(links_, result_.busiestRank, result_.rankBusy);
    most(nics_, result_.busiestNic, result_.nicBusy);
    if (result_.nicBusy > result_.rankBusy && topology_.nic(result_.busiestNic) == result_.busiestNic) {
      result_.busiestRank = result_.busiestNic; // each rank has its own NIC
      result_.rankBusy = result_.nicBusy;
    }
    std::vector<std::array<double, 4>> spent(plan_.world()); // by kind
    for (const Task &task : tasks_) {
      const int kind = static_cast<int>(task.activity.kind);
      double &sum = spent[static_cast<size_t>(task.activity.rank)][static_cast<size_t>(kind)];
      sum += task.activity.end - task.activity.begin;
      result_.secondsByKind[kind] = std::max(result_.secondsByKind[kind], sum);
      if (keep_)
        result_.activities.push_back(task.activity);
    }
    lowerBound();
  }

  void lowerBound() {
    const Manifest &m = plan_.manifest();
    const LowerBounds *bounds = m.lower_bounds();
    if (!bounds || bounds->ranks_per_node() != static_cast<uint64_t>(topology_.ranksPerNode) ||
        bounds->nics_per_node() != static_cast<uint64_t>(topology_.nicsPerNode))
      return;
    const auto rank = static_cast<double>(topology_.linkRate + (bounds->nodes() > 1 ? topology_.nicRate : 0)),
               nic = static_cast<double>(topology_.nicRate);
    auto term = [&](const char *name, uint64_t bytes, double rate) {
      result_.lowerBound.push_back({name, static_cast<double>(bytes) / rate});
    };
    term("ingress of one rank", bounds->rank_ingress(), rank);
    term("egress of replica ranks", bounds->rank_egress(), rank);
    term("mean over all ranks", bounds->rank_mean(), rank);
    term("ingress of one node's NICs", bounds->nic_ingress(), nic);
    term("egress of replica NICs", bounds->nic_egress(), nic);
    term("mean over all NICs", bounds->nic_mean(), nic);
    term("local copies of one rank", bounds->rank_local(), static_cast<double>(topology_.copyRate));
    for (const LowerBoundTerm &each : result_.lowerBound)
      result_.lowerBoundSeconds = std::max(result_.lowerBoundSeconds, each.seconds);
  }

  const Plan &plan_;
  const Topology &topology_;
  const bool keep_;
  const std::function<void(double)> &progress_;
  Simulation result_;
  Flows flows_;
  std::vector<uint32_t> copies_, links_[2], nics_[2]; // resources, by rank or NIC; [0] egress, [1] ingress
  std::vector<Task> tasks_;
  std::vector<Edge> edges_;
  std::map<std::pair<uint32_t, const Step *>, uint32_t> local_; // copies and fills
  size_t finished_ = 0;
};

} // namespace

Result<Simulation> simulate(const Plan &plan, const Topology &topology, bool keep,
                            const std::function<void(double)> &progress) {
  return Simulator(plan, topology, keep, progress).run();
}

} // namespace reshard::analysis
