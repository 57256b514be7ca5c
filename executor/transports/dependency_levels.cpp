// SPDX-License-Identifier: Apache-2.0
#include "executor/transports/dependency_levels.h"

#include <algorithm>
#include <vector>

namespace reshard {

using namespace schema;

namespace {

/// The send and the receive of a message.
struct MessageEnds {
  struct End {
    const LocalRank *rank = nullptr;
    const Step *step = nullptr;
  } send, receive;
};

Status pairUp(const std::vector<LocalRank> &ranks, std::vector<MessageEnds> &messages) {
  for (const LocalRank &rank : ranks)
    for (const Step *step : *rank.segment->steps())
      if (step->kind() == StepKind::send || step->kind() == StepKind::recv) {
        MessageEnds &pair = messages[step->message()];
        MessageEnds::End &end = step->kind() == StepKind::send ? pair.send : pair.receive;
        if (end.step)
          return failed("message " + std::to_string(step->message()) + " is " +
                        (step->kind() == StepKind::send ? "sent" : "received") + " twice, by rank " +
                        std::to_string(end.rank->rank) + " and by rank " + std::to_string(rank.rank));
        end = {&rank, step};
      }
  for (uint64_t m = 0; m < messages.size(); ++m) {
    const auto &[send, receive] = messages[m];
    if (!send.step && !receive.step)
      continue;
    if (!send.step || !receive.step) {
      const MessageEnds::End &one = send.step ? send : receive;
      return failed("message " + std::to_string(m) + " of rank " + std::to_string(one.rank->rank) + " needs rank " +
                    std::to_string(one.step->peer()) +
                    ", which is not in this process; transport 'threads' needs all ranks of the plan in one process");
    }
    if (send.step->peer() != receive.rank->rank || receive.step->peer() != send.rank->rank ||
        send.step->round() != receive.step->round() || send.step->level() != receive.step->level() ||
        send.step->input_count() != receive.step->output_count())
      return failed("message " + std::to_string(m) + " differs between rank " + std::to_string(send.rank->rank) +
                    " and rank " + std::to_string(receive.rank->rank) +
                    ": expected equal peers, rounds, levels and operand counts");
  }
  return {};
}

} // namespace

Status forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks, const CopyVisitor &visit) {
  std::vector<MessageEnds> messages(plan.manifest().messages());
  if (Status status = pairUp(ranks, messages); !status.ok())
    return status;
  struct Item {
    uint16_t level;
    const LocalRank *from, *to;
    const Step *input, *output;
  };
  std::vector<Item> items;
  for (const LocalRank &rank : ranks)
    for (const Step *step : *rank.segment->steps())
      if (step->kind() != StepKind::send && step->kind() != StepKind::recv)
        items.push_back({step->level(), &rank, &rank, step, step});
  for (const auto &[send, receive] : messages)
    if (send.step)
      items.push_back({send.step->level(), send.rank, receive.rank, send.step, receive.step});
  std::stable_sort(items.begin(), items.end(), [](const Item &a, const Item &b) { return a.level < b.level; });
  for (const auto &[level, from, to, input, output] : items) {
    auto operand = [](const LocalRank *rank, uint32_t number) { return rank->segment->operands()->Get(number); };
    for (uint32_t i = 0; input->kind() == StepKind::reduce && i < input->input_count(); ++i)
      if (Status status = visit(level, *from, operand(from, input->first_input() + i), *to, nullptr); !status.ok())
        return status;
    for (uint32_t i = 0; i < output->output_count(); ++i)
      if (Status status =
              visit(level, *from, output->kind() == StepKind::fill ? nullptr : operand(from, input->first_input() + i),
                    *to, operand(to, output->first_output() + i));
          !status.ok())
        return status;
  }
  return {};
}

} // namespace reshard
