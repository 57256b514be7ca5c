// SPDX-License-Identifier: Apache-2.0
// Simulates the reads of all engine replicas of a pool, from the trainer and from each other.
#include "base/work_deadline.h"
#include "report/simulate/pull_ranges.h"
#include "report/simulate/simulate.h"

#include <algorithm>
#include <queue>
#include <string>
#include <tuple>

namespace reshard::report {

namespace {

using namespace schema;

constexpr uint32_t kWindow = 4;   // reads in flight of one lane
constexpr double kRoundTrips = 3; // begin, commit, complete

/// A rank of the source (replica 0) or of an engine replica, with the numbers of what it uses.
struct ReplicaRank {
  uint32_t replica = 0, rank = 0; // rank: of the plan
  int64_t copier = 0, nic = 0;    // copier: also the number of its link
};

/// The ranks of the source and of all engine replicas on the topology. Each replica is on nodes of its own.
class Placement {
public:
  Placement(const PullRanges &ranges, const Topology &topology)
      : topology_(topology), first_(ranges.firstRank()), meshRanks_(ranges.meshRanks()),
        firstNic_(topology.nic(first_)), lastNic_(topology.nic(int64_t{first_} + meshRanks_ - 1)) {}

  ReplicaRank of(uint32_t replica, uint32_t rank) const {
    if (rank < first_ || replica == 0)
      return {0, rank, rank, topology_.nic(rank)};
    return {replica, rank, rank + int64_t{replica} * meshRanks_,
            lastNic_ + 1 + (int64_t{replica} - 1) * (lastNic_ - firstNic_ + 1) + topology_.nic(rank) - firstNic_};
  }
  /// Whether two ranks are on different nodes.
  bool between(const ReplicaRank &a, const ReplicaRank &b) const {
    return topology_.ranksPerNode > 0 && (a.replica != b.replica || topology_.node(a.rank) != topology_.node(b.rank));
  }

private:
  const Topology &topology_;
  const uint32_t first_, meshRanks_;
  const int64_t firstNic_, lastNic_;
};

/// Engine replicas that pull one version. With `late`, replica 0 has the version, and replica 1 alone pulls it.
class Pulls {
public:
  Pulls(const PullRanges &ranges, const Topology &topology, uint32_t replicas, bool late)
      : ranges_(ranges), topology_(topology), placement_(ranges, topology), replicas_(replicas), late_(late),
        states_(size_t{replicas} * ranges.meshRanks()) {
    const ReplicaRank last = placement_.of(replicas - 1, ranges.firstRank() + ranges.meshRanks() - 1);
    copies_.resize(last.copier + 1);
    for (int side = 0; side < 2; ++side) {
      links_[side].resize(last.copier + 1);
      nics_[side].resize(last.nic + 1);
    }
  }

  /// Seconds until all have the version.
  double run() {
    const double roundTrips = kRoundTrips * 2 * static_cast<double>(topology_.nicLatency) * 1e-9;
    for (uint32_t replica = late_ ? 1 : 0; replica < replicas_; ++replica)
      for (uint32_t meshRank = 0; meshRank < ranges_.meshRanks(); ++meshRank) {
        double &copied = copies_[placement_.of(replica, ranges_.firstRank() + meshRank).copier];
        copied = copySeconds(ranges_.of(meshRank).copiedFirst);
        end_ = std::max(end_, copied);
        issue(replica, meshRank);
      }
    while (!events_.empty()) {
      now_ = events_.top().time;
      const uint32_t read = events_.top().read;
      events_.pop();
      WorkDeadline::spend(64);
      advance(read);
    }
    return end_ + roundTrips;
  }
  /// Whether every range has arrived.
  bool complete() const {
    for (size_t s = late_ ? ranges_.meshRanks() : 0; s < states_.size(); ++s)
      if (!ranges_.of(s % ranges_.meshRanks()).all().within(states_[s].landed))
        return false;
    return true;
  }

private:
  /// What one rank of a replica has read.
  struct State {
    RangeProgress next, landed;    // ranges requested; ranges before the first that has not arrived
    uint32_t arrived[2] = {};      // bit i: range landed + i has arrived
    std::vector<uint32_t> waiting; // reads that wait until ranges arrive here
  };
  /// What happens at the time of a read's event.
  enum class Stage : uint8_t { request, pack, send, arrive, unpacked };
  struct Read {
    uint32_t replica, meshRank, range;
    Lane lane;
    Stage stage = Stage::request;
    ReplicaRank client = {}, server = {};
    bool nic = false; // between nodes
  };
  struct Event {
    double time;
    uint64_t number;
    uint32_t read;
    bool operator<(const Event &other) const { return std::tie(time, number) > std::tie(other.time, other.number); }
  };

  State &state(uint32_t replica, uint32_t meshRank) {
    return states_[size_t{replica} * ranges_.meshRanks() + meshRank];
  }
  const PullRange &rangeOf(const Read &read) const { return ranges_.of(read.meshRank).lanes[read.lane][read.range]; }
  double copySeconds(uint64_t bytes) const {
    return static_cast<double>(bytes) / static_cast<double>(topology_.copyRate);
  }

  /// The engine replica that serves a read; -1: the sources.
  int64_t serverReplica(const Read &read) const {
    if (read.lane == kOwn)
      return read.replica;
    return rangeOf(read).bySource ? -1 : int64_t{read.replica} - 1;
  }
  double latency(const Read &read) const {
    return static_cast<double>(read.nic ? topology_.nicLatency : topology_.linkLatency) * 1e-9;
  }

  /// The rank of a replica whose progress a read waits for; null if the server has the bytes.
  State *missingAt(const Read &read) {
    const int64_t replica = serverReplica(read);
    if (replica < 0 || (late_ && replica == 0))
      return nullptr;
    const PullRange &range = rangeOf(read);
    if (read.lane == kOwn) {
      State &sender = state(static_cast<uint32_t>(replica), range.sender - ranges_.firstRank());
      return range.served.within(sender.landed) ? nullptr : &sender;
    }
    State &parent = state(static_cast<uint32_t>(replica), read.meshRank);
    const uint32_t landed = parent.landed.count[kParent];
    const bool there = read.range < landed ||
                       (read.range < landed + kWindow && (parent.arrived[kParent] >> (read.range - landed) & 1) != 0);
    return there ? nullptr : &parent;
  }

  /// Requests as many ranges as both lanes of a rank allow.
  void issue(uint32_t replica, uint32_t meshRank) {
    State &of = state(replica, meshRank);
    for (const Lane lane : {kParent, kOwn}) {
      const std::vector<PullRange> &ranges = ranges_.of(meshRank).lanes[lane];
      for (uint32_t &next = of.next.count[lane];
           next < ranges.size() && next < of.landed.count[lane] + kWindow && ranges[next].wanted.within(of.landed);
           ++next) {
        Read read{replica, meshRank, next, lane};
        read.client = placement_.of(replica, ranges_.firstRank() + meshRank);
        const int64_t from = serverReplica(read);
        read.server = placement_.of(static_cast<uint32_t>(std::max<int64_t>(from, 0)),
                                    lane == kOwn || from < 0 ? ranges[next].sender : read.client.rank);
        read.nic = placement_.between(read.client, read.server);
        uint32_t number = static_cast<uint32_t>(reads_.size());
        if (free_.empty()) {
          reads_.push_back(read);
        } else {
          number = free_.back();
          free_.pop_back();
          reads_[number] = read;
        }
        at(now_ + latency(read), number, Stage::request);
      }
    }
  }

  void at(double time, uint32_t read, Stage stage) {
    reads_[read].stage = stage;
    events_.push({time, ++eventsPushed_, read});
  }

  /// Uses a resource for some seconds as soon as it is free. Returns when it begins.
  double use(double &freeAt, double seconds) {
    const double begin = std::max(now_, freeAt);
    freeAt = begin + seconds;
    return begin;
  }

  void advance(uint32_t number) {
    Read &read = reads_[number];
    const PullRange &range = rangeOf(read);
    const double seconds =
        static_cast<double>(range.bytes) / static_cast<double>(read.nic ? topology_.nicRate : topology_.linkRate);
    switch (read.stage) {
    case Stage::request:
      if (State *missing = missingAt(read))
        return missing->waiting.push_back(number);
      if (range.packed) {
        const double packing = copySeconds(range.bytes);
        return at(use(copies_[read.server.copier], packing) + packing, number, Stage::pack);
      }
      [[fallthrough]];
    case Stage::pack: {
      const double begin = use(read.nic ? nics_[0][read.server.nic] : links_[0][read.server.copier], seconds);
      if (begin > now_)
        return at(begin, number, Stage::send);
      [[fallthrough]];
    }
    case Stage::send: {
      const double begin = use(read.nic ? nics_[1][read.client.nic] : links_[1][read.client.copier], seconds);
      return at(begin + seconds + latency(read), number, Stage::arrive);
    }
    case Stage::arrive:
      if (range.unpacked > 0) {
        const double unpacking = copySeconds(range.unpacked);
        return at(use(copies_[read.client.copier], unpacking) + unpacking, number, Stage::unpacked);
      }
      [[fallthrough]];
    case Stage::unpacked:
      return landed(number);
    }
  }

  /// A range has arrived: continues the reads that waited for it, and requests the next ranges.
  void landed(uint32_t number) {
    const Read read = reads_[number];
    free_.push_back(number);
    end_ = std::max(end_, now_);
    State &of = state(read.replica, read.meshRank);
    uint32_t &landed = of.landed.count[read.lane], &arrived = of.arrived[read.lane];
    arrived |= 1u << (read.range - landed);
    for (; (arrived & 1) != 0; arrived >>= 1)
      ++landed;
    size_t kept = 0;
    for (const uint32_t each : of.waiting)
      if (missingAt(reads_[each]))
        of.waiting[kept++] = each;
      else
        at(now_, each, Stage::request);
    of.waiting.resize(kept);
    issue(read.replica, read.meshRank);
  }

  const PullRanges &ranges_;
  const Topology &topology_;
  const Placement placement_;
  const uint32_t replicas_;
  const bool late_;
  std::vector<State> states_;
  std::vector<double> copies_, links_[2], nics_[2]; // when each is free, by position or NIC; [0] egress, [1] ingress
  std::vector<Read> reads_;
  std::vector<uint32_t> free_; // entries of reads_ that are not in use
  std::priority_queue<Event> events_;
  uint64_t eventsPushed_ = 0;
  double now_ = 0, end_ = 0;
};

/// The lower bounds of a pool. Each byte leaves a source at least once, unless other replicas have it. Replica 0 may
/// share a node with the source.
void addLowerBounds(const Plan &plan, const Topology &topology, PoolSimulation &result) {
  result.lowerBound = lowerBound(plan.manifest(), topology, [&](CutKind kind) {
    return kind != CutKind::replica_node_ingress || result.replicas > 1;
  });
  result.lateLowerBound = lowerBound(plan.manifest(), topology, [](CutKind kind) {
    return kind == CutKind::rank_ingress || kind == CutKind::shared_nic_ingress ||
           kind == CutKind::replica_node_ingress;
  });
}

} // namespace

Result<PoolSimulation> simulatePool(const Plan &plan, const Topology &topology, uint32_t replicas) {
  const Result<PullRanges> ranges = PullRanges::of(plan);
  if (!ranges.ok())
    return ranges.status();
  if (const uint64_t all = uint64_t{replicas} * ranges->meshRanks(); all > kMaxWorld)
    return failed("the engine replicas have " + std::to_string(all) + " ranks, expected at most " +
                  std::to_string(kMaxWorld) +
                  " in a simulation; use --replicas=" + std::to_string(kMaxWorld / ranges->meshRanks()) + " or fewer");
  PoolSimulation result;
  result.replicas = replicas;
  Pulls together(*ranges, topology, replicas, false);
  result.seconds = together.run();
  Pulls late(*ranges, topology, 2, true);
  result.lateSeconds = late.run();
  if (!together.complete() || !late.complete())
    return failed("deadlock: reads of engine replicas wait for each other");
  addLowerBounds(plan, topology, result);
  return result;
}

} // namespace reshard::report
