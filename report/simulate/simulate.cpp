// SPDX-License-Identifier: Apache-2.0
// Simulates the steps of a plan as tasks, and their messages as flows that divide the bandwidth of links. Also the
// lower bound of the time.
#include "report/simulate/simulate.h"

#include "base/work_deadline.h"
#include "executor/memory/chunks.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/proof/plan_verifier.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include <sys/mman.h>

namespace reshard::report {

namespace {

using namespace schema;

/// Sets the size of an empty vector, and asks the system for large pages: where memory is read here and there, the
/// addresses of small pages are looked up as often as the memory itself.
template <class T> void resizeInLargePages(std::vector<T> &vector, size_t size) {
  constexpr uintptr_t kLargePage = 2 << 20;
  vector.reserve(size);
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(vector.data()) + kLargePage - 1) / kLargePage * kLargePage,
                  end = reinterpret_cast<uintptr_t>(vector.data() + size) / kLargePage * kLargePage;
  if (end > begin)
    madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE); // only a request
  vector.resize(size);
}

/// Flows that share resources by max-min fairness. Time advances from the end of one flow to the next.
class FairFlows {
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
  std::vector<uint32_t> free_; // unused entries of flows_
  std::priority_queue<Event> events_;
  double now_ = 0;
  uint64_t update_ = 0;                         // the number of updates
  std::vector<uint32_t> competing_, contended_; // flows and resources of one update
};

class Simulator {
public:
  Simulator(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress)
      : plan_(plan), topology_(topology), progress_(progress) {}

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
    if (Status status = build(segments); !status.ok())
      return status;
    for (uint32_t task = 0; task < count_; ++task)
      if (tasks_[task].waits == 0)
        start(task);
    uint32_t done = 0;
    bool timer = false;
    while (flows_.next(done, timer)) {
      if (!timer)
        ended(done, false);
      if (const double delay = groupOf(done).delay; !timer && delay > 0)
        flows_.at(flows_.now() + delay, done);
      else
        ended(done, true);
      if (finished_ % 1024 == 0)
        progress_(static_cast<double>(finished_) / static_cast<double>(count_));
    }
    if (finished_ != count_)
      return failed("deadlock: only " + std::to_string(finished_) + " of " + std::to_string(count_) +
                    " activities can finish, the others wait for each other");
    report();
    return std::move(result_);
  }

private:
  static constexpr uint32_t kNone = UINT32_MAX;

  /// What the chunks of a step have in common, as tasks of one kind. A task releases its resources when its bytes are
  /// sent (released); the bytes arrive one latency later (arrived). There are millions of tasks, and most are
  /// not in a memory cache when they are needed: so a task is small, and all of it is in one place.
  struct Group {
    Activity activity;                         // all chunks together
    uint32_t first = 0, second = 0;            // resources
    double delay = 0;                          // seconds from released to arrived
    uint32_t task = 0, stride = 1, chunks = 1; // chunk c is task `task` + c * stride
    uint64_t chunk = 0;                        // bytes of each chunk but the last; 0: one chunk

    uint64_t bytesOf(uint32_t number) const {
      const uint64_t left = activity.bytes - chunk * ((number - task) / stride);
      return chunk > 0 ? std::min(chunk, left) : left;
    }
  };
  struct Task {
    uint32_t group = 0;
    uint32_t waits = 0;  // for how many events of other tasks
    uint32_t lists[2]{}; // where the tasks that wait for its events begin in waiting_
    double begin = 0, end = 0;
  };
  /// The tasks of a message.
  struct Message {
    uint32_t first = kNone, stride = 1, firstUnpack = kNone, chunks = 0;
    uint32_t transmit(uint64_t chunk) const { return first + static_cast<uint32_t>(chunk) * stride; }
    uint32_t pack(uint64_t chunk) const { return stride == 2 ? transmit(chunk) + 1 : kNone; }
    uint32_t unpack(uint64_t chunk) const {
      return firstUnpack == kNone ? kNone : firstUnpack + static_cast<uint32_t>(chunk);
    }
    /// The task that ends when the chunk has arrived.
    uint32_t last(uint64_t chunk) const { return firstUnpack == kNone ? transmit(chunk) : unpack(chunk); }
    uint32_t lastTransmit() const { return transmit(chunks - 1); }
  };

  const Group &groupOf(uint32_t task) const { return groups_[tasks_[task].group]; }

  /// Adds a group whose tasks are `stride` apart.
  void add(Group group, uint64_t chunks) {
    group.chunks = static_cast<uint32_t>(chunks);
    groups_.push_back(group);
    count_ = std::max(count_, group.task + (chunks - 1) * group.stride + 1);
  }

  /// Makes a task wait for another one. The first pass over all dependencies counts them, the second one keeps them.
  void after(uint32_t before, bool arrived, uint32_t task) {
    const size_t list = 2 * size_t{before} + arrived;
    if (counting_) {
      ++dependencies_;
      ++tasks_[task].waits;
      ++begin(list + 2);
    } else {
      waiting_[begin(list + 1)++] = task; // ends as the begin of the next list
    }
  }
  /// Where a list begins in waiting_: of the tasks that wait until task list / 2 is released (even), or has arrived.
  uint32_t &begin(size_t list) { return tasks_[list / 2].lists[list % 2]; }

  Status build(const std::vector<std::shared_ptr<const Segment>> &segments) {
    std::vector<Message> messages(plan_.manifest().messages());
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      for (const Step *step : orEmpty(segments[rank]->steps()))
        addTasks(rank, *step, messages);
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      for (const Step *step : orEmpty(segments[rank]->steps()))
        if (step->kind() == StepKind::recv && step->staging() != UINT64_MAX) {
          messages[step->message()].firstUnpack = static_cast<uint32_t>(count_);
          add(groupFor(rank, *step, Activity::Kind::unpack), chunkCount(*step));
        }
    if (count_ >= kNone)
      return failed("the plan has " + std::to_string(count_) + " activities, expected fewer than 2^32 - 1");
    resizeInLargePages(tasks_, count_ + 1); // the last one is the end of all lists
    for (uint32_t number = 0; number < groups_.size(); ++number)
      for (uint32_t chunk = 0; chunk < groups_[number].chunks; ++chunk)
        tasks_[groups_[number].task + chunk * groups_[number].stride].group = number;
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      order(rank, *segments[rank], messages);
    if (dependencies_ > UINT32_MAX)
      return failed("the activities of the plan wait for each other " + std::to_string(dependencies_) +
                    " times, expected fewer than 2^32");
    for (size_t list = 1; list < 2 * tasks_.size(); ++list)
      begin(list) += begin(list - 1);
    resizeInLargePages(waiting_, dependencies_);
    counting_ = false;
    for (uint32_t rank = 0; rank < segments.size(); ++rank)
      order(rank, *segments[rank], messages);
    return {};
  }

  /// A group of tasks that come next and that use the rank's copy bandwidth.
  Group groupFor(uint32_t rank, const Step &step, Activity::Kind kind) const {
    Group group;
    const bool copy = kind == Activity::Kind::copy;
    group.activity = {kind,
                      static_cast<int32_t>(rank),
                      copy ? -1 : static_cast<int32_t>(step.peer()),
                      step.message(),
                      step.round(),
                      step.bytes()};
    group.first = group.second = copies_[rank];
    group.task = static_cast<uint32_t>(count_);
    group.chunk = copy ? 0 : step.chunk();
    return group;
  }

  /// Adds the tasks of a step that is no receive.
  void addTasks(uint32_t rank, const Step &step, std::vector<Message> &messages) {
    if (step.kind() == StepKind::recv)
      return;
    if (step.kind() != StepKind::send) {
      local_[{rank, &step}] = static_cast<uint32_t>(count_);
      return add(groupFor(rank, step, Activity::Kind::copy), 1);
    }
    const uint64_t chunks = chunkCount(step);
    Group packing = groupFor(rank, step, Activity::Kind::pack), sending = packing;
    const bool packs = step.staging() != UINT64_MAX, local = topology_.node(rank) == topology_.node(step.peer());
    sending.activity.kind = Activity::Kind::transmit;
    sending.first = local ? links_[0][rank] : nics_[0][topology_.nic(rank)];
    sending.second = local ? links_[1][step.peer()] : nics_[1][topology_.nic(step.peer())];
    sending.delay = static_cast<double>(local ? topology_.linkLatency : topology_.nicLatency) * 1e-9;
    packing.stride = sending.stride = packs ? 2 : 1;
    packing.task = sending.task + 1;
    messages[step.message()] = {sending.task, sending.stride, kNone, static_cast<uint32_t>(chunks)};
    add(sending, chunks);
    if (packs)
      add(packing, chunks);
  }

  /// Adds the dependencies of a rank's chunks: on the previous chunk of the same tier and direction, on its packing or
  /// unpacking, on the arena slot that was used two chunks ago, on the arrival of relayed bytes, and on the copies that
  /// read the bytes of the arena that a receive replaces; and those of its copies.
  void order(uint32_t rank, const Segment &segment, const std::vector<Message> &messages) {
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
      const Message &message = messages[step->message()];
      Sequence &sequence = sequences[send][topology_.node(rank) == topology_.node(step->peer())];
      for (uint32_t c = 0; c < message.chunks; ++c) {
        const uint32_t transmit = message.transmit(c), copying = send ? message.pack(c) : message.unpack(c);
        if (copying != kNone)
          after(send ? copying : transmit, true, send ? transmit : copying);
        if (sequence.last != kNone)
          after(sequence.last, false, transmit);
        sequence.last = transmit;
        if (copying == kNone)
          continue;
        if (sequence.copying != kNone)
          after(sequence.copying, true, copying);
        sequence.copying = copying;
        uint32_t &slot = sequence.slots[sequence.staged++ % 2];
        if (slot != kNone)
          after(slot, !send, send ? copying : transmit);
        slot = send ? transmit : copying;
      }
      if (send && step->after_count() > 0)
        follow(rank, segment, *step, messages);
      for (uint32_t i = 0; !send && i < step->after_count(); ++i) { // before its bytes of the arena are reused
        const Step &earlier = *segment.steps()->Get(segment.after()->Get(step->first_after() + i));
        const bool sent = earlier.kind() == StepKind::send; // relayed bytes; else elements that a copy quantizes
        if (earlier.kind() != StepKind::recv)
          for (uint32_t c = 0; c < message.chunks; ++c)
            after(sent ? messages[earlier.message()].lastTransmit() : local_.at({rank, &earlier}), !sent,
                  message.transmit(c));
      }
    }
  }

  /// Adds the dependencies of a step that neither sends nor receives.
  void followLocally(uint32_t rank, const Segment &segment, const Step &step, const std::vector<Message> &messages) {
    const uint32_t task = local_.at({rank, &step});
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const Step &earlier = *segment.steps()->Get(segment.after()->Get(step.first_after() + i));
      if (earlier.kind() == StepKind::recv)
        after(messages[earlier.message()].last(messages[earlier.message()].chunks - 1), true, task);
      else if (earlier.kind() == StepKind::send)
        after(messages[earlier.message()].lastTransmit(), false, task);
      else
        after(local_.at({rank, &earlier}), true, task);
    }
  }

  /// Adds the dependencies of a send on the steps that provide its bytes.
  void follow(uint32_t rank, const Segment &segment, const Step &send, const std::vector<Message> &messages) {
    const Message &message = messages[send.message()];
    const std::vector<std::vector<uint64_t>> before = chunksBefore(segment, send);
    for (uint32_t i = 0; i < send.after_count(); ++i) {
      const Step &earlier = *segment.steps()->Get(segment.after()->Get(send.first_after() + i));
      for (uint32_t c = 0; c < message.chunks; ++c)
        if (before[i][c] > 0)
          after(earlier.kind() == StepKind::recv ? messages[earlier.message()].last(before[i][c] - 1)
                                                 : local_.at({rank, &earlier}),
                true, message.pack(c) != kNone ? message.pack(c) : message.transmit(c));
    }
  }

  void start(uint32_t task) {
    const Group &group = groupOf(task);
    tasks_[task].begin = flows_.now();
    flows_.start(task, static_cast<double>(group.bytesOf(task)), group.first, group.second);
  }

  void ended(uint32_t task, bool arrived) {
    if (!arrived) {
      tasks_[task].end = flows_.now();
    } else {
      ++finished_;
      result_.seconds = std::max(result_.seconds, flows_.now());
    }
    const size_t list = 2 * size_t{task} + arrived;
    for (uint32_t at = begin(list), end = begin(list + 1); at < end; ++at)
      if (--tasks_[waiting_[at]].waits == 0)
        start(waiting_[at]);
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
    for (uint32_t task = 0; task < count_; ++task) {
      const Group &group = groupOf(task);
      const int kind = static_cast<int>(group.activity.kind);
      double &sum = spent[static_cast<size_t>(group.activity.rank)][static_cast<size_t>(kind)];
      sum += tasks_[task].end - tasks_[task].begin;
      result_.secondsByKind[kind] = std::max(result_.secondsByKind[kind], sum);
    }
    tasks_.resize(count_);
    waiting_ = {};
    result_.forEachActivity = [groups = std::move(groups_),
                               tasks = std::move(tasks_)](const std::function<void(const Activity &)> &visit) {
      for (uint32_t number = 0; number < tasks.size(); ++number) {
        const Group &group = groups[tasks[number].group];
        Activity activity = group.activity;
        activity.bytes = group.bytesOf(number);
        activity.begin = tasks[number].begin;
        activity.end = tasks[number].end;
        visit(activity);
      }
    };
    result_.lowerBound = lowerBound(plan_.manifest(), topology_, [](CutKind kind) {
      return kind != CutKind::replica_node_ingress; // the plan's ranks run, and no other engine replicas
    });
  }

  const Plan &plan_;
  const Topology &topology_;
  const std::function<void(double)> &progress_;
  Simulation result_;
  FairFlows flows_;
  std::vector<uint32_t> copies_, links_[2], nics_[2]; // resources, by rank or NIC; [0] egress, [1] ingress
  std::vector<Group> groups_;
  std::vector<Task> tasks_;       // and one more
  std::vector<uint32_t> waiting_; // tasks
  uint64_t count_ = 0;            // the number of tasks
  uint64_t dependencies_ = 0;
  bool counting_ = true;                                        // the first pass of after()
  std::map<std::pair<uint32_t, const Step *>, uint32_t> local_; // copies and fills
  size_t finished_ = 0;
};

} // namespace

Result<Simulation> simulate(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress) {
  return Simulator(plan, topology, progress).run();
}

} // namespace reshard::report
