// SPDX-License-Identifier: Apache-2.0
// Flows of bytes that share bandwidth, and timers, in the order of their ends.
#pragma once

#include <array>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

namespace reshard::report {

/// Flows that share resources by max-min fairness. Time advances from the end of one flow to the next.
class FairFlows {
public:
  /// Adds a resource of so many bytes per second; returns its number.
  uint32_t resource(double rate);

  double now() const { return now_; }
  /// Seconds that a resource was in use.
  double busy(uint32_t resource) const { return resources_[resource].busy; }

  /// Starts a flow of `bytes` through one or two resources; next() returns its `id` when it ends.
  void start(uint64_t id, double bytes, uint32_t first, uint32_t second);
  /// Adds timers that take so many seconds each; returns the number of their delay.
  uint32_t delay(double seconds);
  /// Starts a timer; next() returns `id` when it ends.
  void startTimer(uint32_t delay, uint32_t id) { delays_[delay].timers.push({now_ + delays_[delay].seconds, id}); }

  /// Advances to the next end of a flow or timer; returns false if there is none.
  bool next(uint64_t &id, bool &timer);

private:
  struct Resource {
    double rate;
    std::vector<uint32_t> flows;
    double busy = 0, since = 0;
    uint64_t seen = 0; // the last update that found it
  };
  /// Flows that ended are used again, so that those in the memory caches are few.
  struct Flow {
    double left = 0, rate = 0, since = 0, newRate = 0;
    uint64_t id = 0;
    uint32_t version = 0, count = 0;
    std::array<uint32_t, 2> resources{};
    uint64_t seen = 0;
  };
  /// The end of a flow, unless its rate changes before.
  struct Event {
    double time;
    uint32_t flow, version;
    bool operator<(const Event &other) const {
      return std::tie(time, flow, version) > std::tie(other.time, other.flow, other.version);
    }
  };

  struct Timer {
    double time;
    uint32_t id;
  };
  /// Timers of one delay end in the order in which they start, so they need no sorting.
  struct Delay {
    double seconds;
    std::queue<Timer> timers;
  };

  void finish(uint32_t number);
  void setRate(uint32_t number, double rate);
  /// Computes new rates for all flows that compete, directly or indirectly, for the resources of a flow: the most
  /// contended resource first (progressive filling).
  void updateRates(const Flow &changed);

  std::vector<Resource> resources_;
  std::vector<Flow> flows_;
  std::vector<uint32_t> free_; // unused entries of flows_
  std::priority_queue<Event> events_;
  std::vector<Delay> delays_;
  double now_ = 0;
  uint64_t update_ = 0;                         // the number of updates
  std::vector<uint32_t> competing_, contended_; // flows and resources of one update
};

} // namespace reshard::report
