// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/periods.h"

#include <algorithm>
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

} // namespace reshard
