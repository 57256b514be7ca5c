// SPDX-License-Identifier: Apache-2.0
// Rounds that repeat for each copy of the target.

#include "compiler/schedule/message_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

using namespace reshard;

namespace {

constexpr int64_t kChunk = 256;
constexpr int32_t kFirstTarget = 1000;

class AnywhereCuts : public Cuts {
public:
  bool possible(uint32_t, int64_t) const override { return true; }
  int64_t best(uint32_t, int64_t, int64_t to) const override { return to; }
};

/// A job in which each of `chunks.size()` senders has `chunks[sender][target]` chunks for each target of a copy.
struct PeriodicJob {
  std::vector<std::vector<int64_t>> chunks;
  uint32_t copies;

  int32_t targets() const { return static_cast<int32_t>(chunks[0].size()); }
  int32_t inCopy(int32_t rank, uint32_t copy) const { return rank + static_cast<int32_t>(copy) * targets(); }

  std::vector<Flow> flows() const {
    std::vector<Flow> flows;
    for (int32_t sender = 0; sender < static_cast<int32_t>(chunks.size()); ++sender)
      for (int32_t target = 0; target < targets(); ++target)
        if (const int64_t count = chunks[sender][target])
          flows.push_back({{{sender, kFirstTarget + target, -1}}, count * kChunk});
    return flows;
  }

  /// The rounds of the busiest port.
  int64_t needed() const {
    int64_t most = 0;
    std::map<int32_t, int64_t> into;
    for (const std::vector<int64_t> &sends : chunks) {
      int64_t out = 0;
      for (int32_t target = 0; target < targets(); ++target) {
        out += sends[target] * copies;
        most = std::max({most, out, into[target] += sends[target]});
      }
    }
    return most;
  }
};

/// The messages of all periods; none if the periods would take too long.
std::vector<Message> messagesOf(const PeriodicJob &job, const std::vector<Flow> &flows) {
  const auto inCopy = [&](int32_t rank, uint32_t copy) { return job.inCopy(rank, copy); };
  Periods periods(flows, job.copies, inCopy);
  RoundLimits limits;
  limits.internodeBytes = limits.intranodeBytes = kChunk;
  const auto first = periods.first({}, limits, AnywhereCuts());
  if (!first)
    return {};
  uint32_t rounds = 0;
  for (const Message &message : *first)
    rounds = std::max(rounds, message.round + message.rounds);
  std::vector<Message> all;
  for (uint32_t period = 0; period < periods.count(); ++period)
    for (Message message : *first) {
      message.to = periods.to(message, period);
      message.round += period * rounds;
      all.push_back(std::move(message));
    }
  return all;
}

/// Every copy receives every flow once, no port has two messages in a round, and the rounds are nearly as few as
/// needed.
void check(const PeriodicJob &job) {
  const std::vector<Flow> flows = job.flows();
  const std::vector<Message> messages = messagesOf(job, flows);
  ASSERT_FALSE(messages.empty());
  std::set<std::tuple<int32_t, bool, uint32_t>> busy;                         // rank, whether it sends, round
  std::map<std::pair<uint32_t, int32_t>, std::map<int64_t, int64_t>> arrived; // by flow and target: [begin, end)
  int64_t rounds = 0;
  for (const Message &message : messages) {
    for (uint32_t round = message.round; round < message.round + message.rounds; ++round) {
      EXPECT_TRUE(busy.emplace(message.from, true, round).second);
      EXPECT_TRUE(busy.emplace(message.to, false, round).second);
    }
    rounds = std::max<int64_t>(rounds, int64_t{message.round} + message.rounds);
    for (const Grant &grant : message.grants) {
      EXPECT_EQ(message.from, flows[grant.flow].hops[0].from);
      EXPECT_TRUE(arrived[std::make_pair(grant.flow, message.to)].try_emplace(grant.begin, grant.end).second);
    }
  }
  for (uint32_t flow = 0; flow < flows.size(); ++flow)
    for (uint32_t copy = 0; copy < job.copies; ++copy) {
      int64_t end = 0;
      for (const auto &[begin, to] : arrived[std::make_pair(flow, job.inCopy(flows[flow].hops[0].to, copy))]) {
        EXPECT_EQ(begin, end);
        end = to;
      }
      EXPECT_EQ(end, flows[flow].bytes);
    }
  EXPECT_LE(rounds, job.needed() + job.needed() / 64);
}

} // namespace

TEST(Periods, ShardsToCopies) {
  check({std::vector<std::vector<int64_t>>(16, {1, 1}), 8});   // each copy is served by two senders at a time
  check({std::vector<std::vector<int64_t>>(3, {2, 5, 1}), 7}); // more copies than senders, which are the busiest
  std::vector<std::vector<int64_t>> uneven;                    // a quarter of the senders has most for each target
  for (int64_t sender = 0; sender < 64; ++sender) {
    uneven.emplace_back(4, 2);
    uneven.back()[static_cast<size_t>(sender / 16)] = 6;
  }
  check({uneven, 16});
}

TEST(Periods, NotIfTheyTakeLonger) {
  // Three senders to two copies: one copy would be served by two of them in one period, which takes four rounds for
  // three.
  const PeriodicJob job{std::vector<std::vector<int64_t>>(3, {1}), 2};
  EXPECT_TRUE(messagesOf(job, job.flows()).empty());
}
