// SPDX-License-Identifier: Apache-2.0
#include "report/simulate/fair_flows.h"

#include "base/work_deadline.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace reshard::report {

uint32_t FairFlows::resource(double rate) {
  resources_.push_back({rate, {}});
  return static_cast<uint32_t>(resources_.size() - 1);
}

uint32_t FairFlows::delay(double seconds) {
  delays_.push_back({seconds, {}});
  return static_cast<uint32_t>(delays_.size() - 1);
}

void FairFlows::start(uint64_t id, double bytes, uint32_t first, uint32_t second) {
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
  double alone = INFINITY; // the rate if it competes with no other flow
  bool competes = false;
  for (uint32_t i = 0; i < flow.count; ++i) {
    Resource &resource = resources_[flow.resources[i]];
    if (resource.flows.empty())
      resource.since = now_;
    else
      competes = true;
    resource.flows.push_back(number);
    alone = std::min(alone, resource.rate);
  }
  if (competes)
    updateRates(flow);
  else
    setRate(number, alone);
}

bool FairFlows::next(uint64_t &id, bool &timer) {
  while (!events_.empty() && flows_[events_.top().flow].version != events_.top().version)
    events_.pop(); // its rate has changed since
  Delay *first = nullptr;
  double time = events_.empty() ? INFINITY : events_.top().time;
  for (Delay &each : delays_)
    if (!each.timers.empty() && each.timers.front().time <= time) {
      first = &each;
      time = first->timers.front().time;
    }
  timer = first != nullptr;
  if (!timer && events_.empty())
    return false;
  now_ = time;
  if (timer) {
    id = first->timers.front().id;
    first->timers.pop();
    return true;
  }
  const uint32_t ended = events_.top().flow;
  events_.pop();
  id = flows_[ended].id;
  finish(ended);
  return true;
}

void FairFlows::finish(uint32_t number) {
  Flow &flow = flows_[number];
  ++flow.version;
  bool competed = false;
  for (uint32_t i = 0; i < flow.count; ++i) {
    Resource &resource = resources_[flow.resources[i]];
    std::erase(resource.flows, number);
    if (resource.flows.empty())
      resource.busy += now_ - resource.since;
    else
      competed = true;
  }
  if (competed)
    updateRates(flow);
  free_.push_back(number);
}

void FairFlows::setRate(uint32_t number, double rate) {
  Flow &flow = flows_[number];
  flow.left = std::max(0.0, flow.left - flow.rate * (now_ - flow.since));
  flow.since = now_;
  flow.rate = rate;
  events_.push({now_ + flow.left / flow.rate, number, ++flow.version});
}

void FairFlows::updateRates(const Flow &changed) {
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
  for (const uint32_t f : competing_)
    if (flows_[f].newRate != flows_[f].rate) // else its end is known
      setRate(f, flows_[f].newRate);
}

} // namespace reshard::report
