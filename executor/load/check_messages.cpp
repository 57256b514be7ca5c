// SPDX-License-Identifier: Apache-2.0
// Compares the send and the receive of every message, which no rank can do alone.
#include "base/parallel.h"
#include "executor/load/load.h"

#include <algorithm>

namespace reshard {
namespace {

using namespace schema;

constexpr uint32_t kNone = UINT32_MAX;

struct StepOfRank {
  uint32_t rank = kNone, step = 0;
};
struct MessageSteps {
  StepOfRank send, receive;
};

/// "message 7 from rank 1 to rank 2"
std::string name(uint32_t message, const MessageSteps &ends) {
  return "message " + std::to_string(message) + " from rank " + std::to_string(ends.send.rank) + " to rank " +
         std::to_string(ends.receive.rank);
}

Status compare(uint32_t message, const MessageSteps &ends, const Segment &from, const Segment &to) {
  const Step &send = *from.steps()->Get(ends.send.step), &receive = *to.steps()->Get(ends.receive.step);
  auto differ = [&](const std::string &what, uint64_t sent, uint64_t received) {
    return badPlan(name(message, ends) + ": found " + what + " " + std::to_string(sent) + " on the sender, " +
                   std::to_string(received) + " on the receiver, expected the same");
  };
  if (send.peer() != ends.receive.rank || receive.peer() != ends.send.rank)
    return badPlan(name(message, ends) + ": found peers " + std::to_string(send.peer()) + " and " +
                   std::to_string(receive.peer()) + ", expected each other");
  if (send.round() != receive.round())
    return differ("round", send.round(), receive.round());
  if (send.level() != receive.level())
    return differ("dependency level", send.level(), receive.level());
  if (send.bytes() != receive.bytes())
    return differ("bytes", send.bytes(), receive.bytes());
  if (send.chunk() != receive.chunk())
    return differ("chunks", send.chunk(), receive.chunk());
  if (send.input_count() != receive.output_count())
    return differ("operands", send.input_count(), receive.output_count());
  for (uint32_t i = 0; i < send.input_count(); ++i) {
    const Shape &x = *from.shapes()->Get(from.operands()->Get(send.first_input() + i)->shape());
    const Shape &y = *to.shapes()->Get(to.operands()->Get(receive.first_output() + i)->shape());
    if (!shapesMatch(from, x, to, y))
      return badPlan(name(message, ends) + ": operand shapes differ at operand " + std::to_string(i) +
                     ", expected equal rows and loop counts");
  }
  return {};
}

} // namespace

Status checkMessages(const Plan &plan) {
  std::vector<std::shared_ptr<const Segment>> segments(plan.world());
  for (uint32_t rank = 0; rank < plan.world(); ++rank)
    if (Status status = plan.segment(rank, segments[rank]); !status.ok())
      return status;
  return checkMessages(plan, segments, 1);
}

Status checkMessages(const Plan &plan, std::span<const std::shared_ptr<const Segment>> segments, unsigned threads) {
  std::vector<MessageSteps> messages(plan.manifest().messages());
  for (uint32_t rank = 0; rank < segments.size(); ++rank) {
    const auto *steps = segments[rank]->steps();
    for (uint32_t s = 0; s < (steps ? steps->size() : 0); ++s) {
      const Step &step = *steps->Get(s);
      if (step.kind() != StepKind::send && step.kind() != StepKind::recv)
        continue;
      const bool send = step.kind() == StepKind::send;
      StepOfRank &end = send ? messages[step.message()].send : messages[step.message()].receive;
      if (end.rank != kNone)
        return badPlan("message " + std::to_string(step.message()) + " is " + (send ? "sent" : "received") +
                       " twice, by rank " + std::to_string(end.rank) + " and by rank " + std::to_string(rank));
      end = {rank, s};
    }
  }
  constexpr size_t kMessages = 4096; // a thread compares so many at a time
  std::vector<Status> found((messages.size() + kMessages - 1) / kMessages);
  parallelFor(found.size(), threads, [&](size_t part) {
    const size_t end = std::min(messages.size(), (part + 1) * kMessages);
    for (size_t m = part * kMessages; m < end && found[part].ok(); ++m) {
      const MessageSteps &ends = messages[m];
      const auto number = static_cast<uint32_t>(m);
      if (ends.send.rank == kNone || ends.receive.rank == kNone)
        found[part] = badPlan("message " + std::to_string(m) + " is " +
                              (ends.send.rank == kNone
                                   ? ends.receive.rank == kNone ? "neither sent nor received" : "received but not sent"
                                   : "sent but not received"));
      else
        found[part] = compare(number, ends, *segments[ends.send.rank], *segments[ends.receive.rank]);
    }
  });
  for (Status &status : found)
    if (!status.ok())
      return std::move(status);
  return {};
}

} // namespace reshard
