// SPDX-License-Identifier: Apache-2.0
// Builds the table from the steps of a segment: what each message needs before it can be served, and which local steps
// run before a message is received.
#include "executor/pull/message_table.h"

#include "executor/memory/chunks.h"

#include <algorithm>

namespace reshard::pull {

using namespace schema;

void PullProgress::reset() {
  for (auto &each : confirmed_)
    each.store(0, std::memory_order_release);
  setLocals(0);
}

Status MessageTable::build(const Plan &plan, const Fleet &fleet, const LocalRank &rank, uint32_t worldRank) {
  fleet_ = fleet;
  worldRank_ = worldRank;
  const auto &steps = *rank.segment->steps();
  index_.resize(steps.size());
  for (uint32_t number = 0; number < steps.size(); ++number) {
    const StepKind kind = steps.Get(number)->kind();
    if (!fleet.isTarget(worldRank) && kind != StepKind::send)
      return failed("rank " + std::to_string(worldRank) + " is a source, which only sends in pull mode; found a step " +
                    EnumNameStepKind(kind) + "; compile the plan again, with `replicas` of the target");
    Status status = kind == StepKind::recv   ? addReceive(plan, rank, number)
                    : kind == StepKind::send ? addSend(rank, number)
                                             : addLocal(rank, number);
    if (!status.ok())
      return status;
  }
  return {};
}

Status MessageTable::addReceive(const Plan &plan, const LocalRank &rank, uint32_t number) {
  const Segment &segment = *rank.segment;
  const Step &step = *segment.steps()->Get(number);
  ReceivedMessage &message = received_.emplace_back();
  message.message = step.message();
  message.sender = step.peer();
  message.shared = true;
  bool arena = false;
  for (uint32_t i = 0; i < step.output_count(); ++i) {
    const Operand &operand = *segment.operands()->Get(step.first_output() + i);
    if (Status status = message.packing.add(rank, operand); !status.ok())
      return status;
    const size_t range = bufferRangeOf(segment, operand.buffer());
    arena = arena || range == segment.buffers()->size();
    if (range == segment.buffers()->size()) {
      message.shared = false;
      continue;
    }
    const BufferRange &buffer = *segment.buffers()->Get(static_cast<uint32_t>(range));
    const Param &param = *plan.manifest().endpoints()->Get(buffer.endpoint())->params()->Get(buffer.param());
    message.shared = message.shared && !param.view();
  }
  message.shared = message.shared && !message.packing.converts(); // casts only write
  // Fetched bytes have buffers of their own, so steps that only share slots of the arena do not wait for each other.
  for (uint32_t i = 0; i < step.after_count(); ++i) {
    const uint32_t earlier = segment.after()->Get(step.first_after() + i);
    const StepKind kind = segment.steps()->Get(earlier)->kind();
    if (kind == StepKind::send && arena)
      return failed("step " + std::to_string(number) + " of rank " + std::to_string(worldRank_) +
                    " receives into memory from which an earlier step relays bytes, which pull mode does not support");
    if (kind != StepKind::recv && kind != StepKind::send)
      message.localsBefore = std::max(message.localsBefore, static_cast<uint32_t>(index_[earlier]) + 1);
  }
  index_[number] = received_.size() - 1;
  byId_[step.message()] = {StepKind::recv, index_[number]};
  return {};
}

Status MessageTable::addSend(const LocalRank &rank, uint32_t number) {
  const Segment &segment = *rank.segment;
  const Step &step = *segment.steps()->Get(number);
  SentMessage &message = sent_.emplace_back();
  message.receiver = step.peer();
  message.chunk = step.chunk();
  for (uint32_t i = 0; i < step.input_count(); ++i)
    if (Status status = message.packing.add(rank, *segment.operands()->Get(step.first_input() + i)); !status.ok())
      return status;
  const std::vector<std::vector<uint64_t>> before = chunksBefore(segment, step);
  for (uint32_t i = 0; i < step.after_count(); ++i) {
    const uint32_t earlier = segment.after()->Get(step.first_after() + i);
    const Step &from = *segment.steps()->Get(earlier);
    if (from.kind() == StepKind::recv) {
      SentMessage::Need need{index_[earlier], {}};
      for (const uint64_t chunks : before[i])
        need.bytes.push_back(chunks >= chunkCount(from) ? from.bytes() : chunks * from.chunk());
      message.needs.push_back(std::move(need));
    } else if (from.kind() != StepKind::send) {
      message.localsBefore = std::max(message.localsBefore, static_cast<uint32_t>(index_[earlier]) + 1);
    }
  }
  index_[number] = sent_.size() - 1;
  byId_[step.message()] = {StepKind::send, index_[number]};
  return {};
}

Status MessageTable::addLocal(const LocalRank &rank, uint32_t number) {
  const Segment &segment = *rank.segment;
  const Step &step = *segment.steps()->Get(number);
  if (Status status = copies_.addStep(rank, step); !status.ok())
    return status;
  LocalStep &local = locals_.emplace_back();
  local.end = copies_.size();
  for (uint32_t i = 0; i < step.after_count(); ++i)
    if (const uint32_t earlier = segment.after()->Get(step.first_after() + i);
        segment.steps()->Get(earlier)->kind() == StepKind::recv)
      local.received.push_back(index_[earlier]);
  index_[number] = locals_.size() - 1;
  return {};
}

MessageTable::Serves MessageTable::find(uint32_t message, uint32_t client, ServedMessage &served) const {
  const auto found = byId_.find(message);
  if (found == byId_.end() || !fleet_.isTarget(client) || client == worldRank_)
    return Serves::no;
  const auto [kind, index] = found->second;
  if (kind == StepKind::send) {
    const SentMessage &sent = sent_[index];
    if (fleet_.planRank(client) != sent.receiver ||
        (fleet_.isTarget(worldRank_) && fleet_.replicaOf(client) != fleet_.replicaOf(worldRank_)))
      return Serves::no;
    served = {&sent.packing, &sent, 0};
    return Serves::yes;
  }
  // A rank of another replica that receives the same message.
  if (fleet_.meshRankOf(client) != fleet_.meshRankOf(worldRank_))
    return Serves::no;
  if (!received_[index].shared)
    return Serves::askSender;
  served = {&received_[index].packing, nullptr, index};
  return Serves::yes;
}

bool MessageTable::ready(const ServedMessage &served, uint64_t begin, uint64_t end, const PullProgress &progress) {
  if (!served.sent)
    return progress.confirmed(served.received) >= end;
  const SentMessage &sent = *served.sent;
  if (progress.locals() < sent.localsBefore)
    return false;
  const uint64_t first = sent.chunk > 0 ? begin / sent.chunk : 0, last = sent.chunk > 0 ? (end - 1) / sent.chunk : 0;
  for (const SentMessage::Need &need : sent.needs)
    for (uint64_t chunk = first; chunk <= last; ++chunk)
      if (progress.confirmed(need.received) < need.bytes[chunk])
        return false;
  return true;
}

} // namespace reshard::pull
