// SPDX-License-Identifier: Apache-2.0
// Chooses the sizes of chunks, assigns flows to rounds, and lists the ends of messages by rank.
#include "compiler/schedule/message_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <queue>
#include <tuple>

namespace reshard {

namespace {

/// The periods may take 1 / kTolerance more rounds than the busiest port needs.
constexpr int64_t kTolerance = 64;

int64_t chunksOf(const Flow &flow, int64_t chunkBytes) { return (flow.bytes + chunkBytes - 1) / chunkBytes; }

/// The rounds that the busiest port needs if each flow is sent to so many copies.
int64_t roundsNeeded(llvm::ArrayRef<Flow> flows, int64_t chunkBytes, int64_t copies) {
  std::map<int32_t, int64_t> sends, receives; // chunks, by rank
  for (const Flow &flow : flows) {
    sends[flow.hops[0].from] += chunksOf(flow, chunkBytes) * copies;
    receives[flow.hops[0].to] += chunksOf(flow, chunkBytes);
  }
  int64_t most = 0;
  for (const auto *ports : {&sends, &receives})
    for (const auto &[rank, chunks] : *ports)
      most = std::max(most, chunks);
  return most;
}

} // namespace

/// Distributes the flows of each target over the copies: the flow with the most chunks first, each to the copy with the
/// fewest chunks (R. L. Graham, 1969).
void Periods::distribute(int64_t chunkBytes) {
  std::map<int32_t, std::vector<uint32_t>> ofTarget;
  for (uint32_t flow = 0; flow < flows_.size(); ++flow)
    ofTarget[flows_[flow].hops[0].to].push_back(flow);
  for (auto &[target, numbers] : ofTarget) {
    std::stable_sort(numbers.begin(), numbers.end(), [&](uint32_t a, uint32_t b) {
      return chunksOf(flows_[a], chunkBytes) > chunksOf(flows_[b], chunkBytes);
    });
    using Load = std::pair<int64_t, uint32_t>; // chunks, copy
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    for (uint32_t copy = 0; copy < copies_; ++copy)
      loads.emplace(0, copy);
    for (const uint32_t flow : numbers) {
      const auto [chunks, copy] = loads.top();
      loads.pop();
      loads.emplace(chunks + chunksOf(flows_[flow], chunkBytes), copy);
      copyOf_[flow] = copy;
    }
  }
}

std::optional<std::vector<Message>> Periods::first(const ir::Topology &topology, const RoundLimits &limits,
                                                   const Cuts &cuts) {
  distribute(limits.intranodeBytes);
  std::vector<Flow> flows = flows_.vec();
  for (size_t flow = 0; flow < flows.size(); ++flow)
    flows[flow].hops[0].to = inCopy_(flows[flow].hops[0].to, copyOf_[flow]);
  std::vector<Message> messages = assignRounds(flows, topology, limits, cuts);
  int64_t rounds = 0;
  for (const Message &message : messages)
    rounds = std::max<int64_t>(rounds, int64_t{message.round} + message.rounds);
  const int64_t needed = roundsNeeded(flows_, limits.intranodeBytes, copies_);
  if (rounds * copies_ > needed + needed / kTolerance)
    return std::nullopt;
  return messages;
}

ir::Step MessageSide::step(int32_t rank, const Message &of, int64_t world) const {
  ir::Step step;
  step.kind = receive ? ir::StepKind::recv : ir::StepKind::send;
  step.round = round;
  step.peer = static_cast<int32_t>((receive ? rank + world - distance : rank + int64_t{distance}) % world);
  step.message = message;
  step.bytes = of.bytes;
  step.chunk = of.chunk;
  return step;
}

std::vector<std::vector<MessageSide>> messageSides(llvm::ArrayRef<Message> messages, const Periods *periods,
                                                   uint32_t periodRounds, int64_t world) {
  std::vector<std::vector<MessageSide>> sides(static_cast<size_t>(world));
  uint32_t number = 0;
  for (uint32_t period = 0; period < (periods ? periods->count() : 1); ++period)
    for (const Message &message : messages) {
      const int32_t to = periods ? periods->to(message, period) : message.to;
      const auto distance = static_cast<uint32_t>((to - message.from + world) % world);
      const uint32_t round = message.round + period * periodRounds;
      sides[message.from].push_back({round, false, distance, number});
      sides[to].push_back({round, true, distance, number});
      ++number;
    }
  for (std::vector<MessageSide> &ofRank : sides)
    std::sort(ofRank.begin(), ofRank.end(), [](const MessageSide &a, const MessageSide &b) {
      return std::tie(a.round, a.receive, a.distance, a.message) < std::tie(b.round, b.receive, b.distance, b.message);
    });
  return sides;
}

namespace {

class MessagePlanner {
public:
  MessagePlanner(Flows &flows, const RoundLimits &limits)
      : flows_(flows), copies_(flows.copies), topology_(flows.layout.topology), limits_(limits) {}

  llvm::Expected<MessagePlan> run() {
    const auto inCopy = [&](int32_t rank, uint32_t copy) { return copies_.target(rank, copy); };
    std::optional<Periods> periods;
    uint32_t periodRounds = 0;
    if (copies_.copies().each() > 1 && !flows_.flows.empty()) {
      periods.emplace(flows_.flows, static_cast<uint32_t>(copies_.copies().each()), inCopy);
      if (std::optional<std::vector<Message>> first = periods->first(topology_, limits_, cuts(0, flows_.flows.size())))
        periodRounds = addPeriods(std::move(*first), periods->count());
      else {
        periods.reset();
        repeatFlows();
      }
    }
    if (!periods)
      assignAll();
    flows_.descriptors.cut(plan_.messages);
    noteArrivals();
    if (plan_.count() * static_cast<uint64_t>(copies_.copies().sources()) > UINT32_MAX)
      return llvm::createStringError("the ranks exchange " +
                                     std::to_string(plan_.count() * static_cast<uint64_t>(copies_.copies().sources())) +
                                     " messages, expected at most 4294967295; use fewer ranks");
    plan_.sides = messageSides(plan_.messages, periods ? &*periods : nullptr, periodRounds, flows_.layout.world);
    return std::move(plan_);
  }

private:
  /// Adds the messages of all periods; returns the rounds of each.
  uint32_t addPeriods(std::vector<Message> first, uint32_t count) {
    plan_.messages = std::move(first);
    plan_.periods = count;
    uint32_t rounds = 0;
    for (const Message &message : plan_.messages)
      rounds = std::max(rounds, message.round + message.rounds);
    plan_.rounds = rounds * count;
    plan_.lastRound[EpochPhase{}] = plan_.rounds - 1;
    return rounds;
  }

  /// Repeats the flows to the first copy of the target for the other copies that the first copy of the source serves.
  /// They share their lists of descriptors.
  void repeatFlows() {
    const std::vector<FlowKey> &keys = flows_.keys;
    const auto each = static_cast<size_t>(copies_.copies().each());
    std::vector<FlowKey> allKeys;
    std::vector<Flow> all;
    std::vector<uint32_t> lists;
    allKeys.reserve(keys.size() * each);
    all.reserve(keys.size() * each);
    lists.reserve(keys.size() * each);
    for (size_t first = 0, last = 0; first < keys.size(); first = last) { // the flows of one source
      while (last < keys.size() && keys[last].source == keys[first].source)
        ++last;
      for (uint32_t copy = 0; copy < each; ++copy)
        for (size_t flow = first; flow < last; ++flow) {
          allKeys.push_back(keys[flow]);
          allKeys.back().target = copies_.target(keys[flow].target, copy);
          all.push_back(flows_.flows[flow]);
          all.back().hops[0].to = allKeys.back().target;
          lists.push_back(static_cast<uint32_t>(flow));
        }
    }
    flows_.keys = std::move(allKeys);
    flows_.flows = std::move(all);
    flows_.descriptors.repeat(std::move(lists));
  }

  /// Assigns the flows of each epoch and phase to rounds.
  void assignAll() {
    const std::vector<FlowKey> &keys = flows_.keys;
    for (size_t first = 0; first < keys.size();) {
      size_t last = first;
      while (last < keys.size() && keys[last].when == keys[first].when)
        ++last;
      std::vector<Message> messages =
          assignRounds(llvm::ArrayRef(flows_.flows).slice(first, last - first), topology_, limits_, cuts(first, last));
      uint32_t rounds = 0;
      for (Message &message : messages) {
        rounds = std::max(rounds, message.round + message.rounds);
        message.round += plan_.rounds;
        for (Grant &grant : message.grants)
          grant.flow += static_cast<uint32_t>(first);
      }
      if (first == 0)
        plan_.messages = std::move(messages);
      else
        plan_.messages.insert(plan_.messages.end(), std::make_move_iterator(messages.begin()),
                              std::make_move_iterator(messages.end()));
      plan_.rounds += rounds;
      plan_.lastRound[keys[first].when] = plan_.rounds - 1;
      first = last;
    }
  }

  /// The positions at which flows [first, last), counted from 0, may be cut.
  DescriptorCuts cuts(size_t first, size_t last) const {
    return flows_.descriptors.cuts(first, last, [&](const ir::Descriptor &d) { return flows_.keyOf.blockBytes(d); });
  }

  /// Records which message brings the bytes that later hops forward.
  void noteArrivals() {
    const std::vector<Flow> &flows = flows_.flows;
    if (std::none_of(flows.begin(), flows.end(), [](const Flow &flow) { return flow.hops.size() > 1; }))
      return;
    plan_.arrivals.resize(flows.size());
    for (uint32_t m = 0; m < plan_.messages.size(); ++m)
      for (const Grant &grant : plan_.messages[m].grants)
        if (const size_t hops = flows[grant.flow].hops.size(); hops > 1) {
          plan_.arrivals[grant.flow].resize(hops);
          plan_.arrivals[grant.flow][grant.hop].emplace_back(grant.end, m);
        }
  }

  Flows &flows_;
  const RankCopies &copies_;
  const ir::Topology &topology_;
  const RoundLimits &limits_;
  MessagePlan plan_;
};

} // namespace

llvm::Expected<MessagePlan> planMessages(Flows &flows) {
  int64_t staged = 0; // bytes of the arena besides messages, of the rank with the most
  for (int32_t rank = 0; rank < flows.layout.world; ++rank)
    staged = std::max(staged, ir::stagedBytes(flows.layout, flows.buffers.of(rank)) + flows.staged.bytes(rank) +
                                  flows.relays.held(rank));
  llvm::Expected<RoundLimits> limits = roundLimits(flows.flows, flows.layout, staged, flows.copies.copies().each());
  if (!limits)
    return limits.takeError();
  return MessagePlanner(flows, *limits).run();
}

} // namespace reshard
