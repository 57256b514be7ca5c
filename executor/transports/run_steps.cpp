// SPDX-License-Identifier: Apache-2.0
// Chooses how each step of a rank moves its bytes: within the rank, out of or into the memory of a local peer, through
// the sender's slots, or over the channel. Links the steps with those for which they wait.
#include "executor/transports/run_steps.h"

#include "executor/load/load.h"

#include <algorithm>
#include <set>

namespace reshard {

using namespace schema;

namespace {

/// Messages to look at, from the first unfinished one on.
constexpr size_t kAhead = 8;
/// If the processes of a host copy more than this in a run, nothing of it is in the caches in the next run, and
/// streaming stores are faster.
constexpr uint64_t kStreamBytes = 64 << 20;

} // namespace

std::string messageText(bool send, const MessageState &message, uint64_t chunk) {
  return std::string(": message ") + std::to_string(message.step->message()) + " of round " +
         std::to_string(message.step->round()) + (send ? " to rank " : " from rank ") +
         std::to_string(message.step->peer()) + ", chunk " + std::to_string(chunk) + " of " +
         std::to_string(message.chunks);
}

void RunSteps::beginRun() {
  for (auto &method : messages)
    for (MessageState &message : method)
      message.begun = message.done = message.copied = 0;
  first = {};
  copied = local = 0;
}

bool RunSteps::finished() const {
  for (const Method method : {kReceive, kSend, kCopyFromPeer, kPublish})
    if (first[method] < messages[method].size())
      return false;
  return copied == copies.size();
}

std::span<MessageState> RunSteps::next(Method method) {
  return std::span(messages[method]).subspan(first[method], std::min(kAhead, messages[method].size() - first[method]));
}

void RunSteps::skipFinished(Method method) {
  const auto &all = messages[method];
  while (first[method] < all.size() && all[first[method]].done == all[first[method]].chunks)
    ++first[method];
}

uint64_t RunSteps::done(uint32_t step) const {
  const auto [method, at] = where[step];
  return method == kLocal ? copied >= at : messages[method][at].done;
}

bool RunSteps::dependenciesDone(const MessageState &message) const {
  for (const auto &[step, chunks] : message.dependencies)
    if (done(step) < chunks[message.begun])
      return false;
  return true;
}

RunStepsBuilder::RunStepsBuilder(const Plan &plan, const LocalRank &rank, LocalPeers &peers,
                                 const std::map<uint32_t, PeerAddress> &addresses, bool shortcut, RunSteps &steps)
    : plan_(plan), rank_(rank), peers_(peers), addresses_(addresses), shortcut_(shortcut), steps_(steps) {
  steps_.where.resize(rank_.segment->steps()->size());
}

Status RunStepsBuilder::addSteps(bool sends) {
  Status status;
  for (uint32_t s = 0; s < steps_.where.size() && status.ok(); ++s)
    if ((rank_.segment->steps()->Get(s)->kind() == StepKind::send) == sends)
      status = addStep(s);
  steps_.stream = steps_.bytes() * (addresses_.size() + 1) >= kStreamBytes; // assumes that local peers copy as much
  return status;
}

Status RunStepsBuilder::addStep(uint32_t number) {
  const Step &step = *rank_.segment->steps()->Get(number);
  const bool sends = step.kind() == StepKind::send;
  if (!sends && step.kind() != StepKind::recv)
    return addLocal(step, number);
  MessageState message;
  message.step = &step;
  message.chunks = chunkCount(step);
  const Result<Method> method = sends ? placeSend(message, number) : placeReceive(message);
  if (!method.ok())
    return method.status();
  if (*method == kSend || *method == kReceive)
    if (Status status = addOperands(message, number, sends); !status.ok())
      return status;
  steps_.where[number] = {*method, steps_.messages[*method].size()};
  steps_.messages[*method].push_back(std::move(message));
  return {};
}

Status RunStepsBuilder::addLocal(const Step &step, uint32_t number) {
  steps_.by.local += step.bytes();
  if (Status status = steps_.copies.addStep(rank_, step); !status.ok())
    return status;
  steps_.where[number] = {kLocal, steps_.copies.size()}; // the end of its copies
  steps_.locals.emplace_back().step = &step;
  steps_.localEnds.push_back(steps_.copies.size());
  return {};
}

Method RunStepsBuilder::placeSend(MessageState &message, uint32_t number) {
  const CopiedFrom from = shortcut_ ? peers_.progress(number).copiedFrom.load() : CopiedFrom::channel;
  if (from != CopiedFrom::channel)
    message.progress = &peers_.progress(number);
  return from == CopiedFrom::boundMemory ? kPublish : kSend;
}

Result<Method> RunStepsBuilder::placeReceive(MessageState &message) {
  const Step &step = *message.step;
  const auto peer = addresses_.find(step.peer());
  Method method = kReceive;
  bool relayed = false;
  if (peer != addresses_.end())
    if (const LocalRank *other = peers_.attach(plan_, step.peer(), peer->second)) {
      const Result<SenderMemory> memory = pairWithSender(*other, message);
      if (!memory.ok())
        return memory.status();
      method = memory->mapped ? kCopyFromPeer : kReceive;
      relayed = memory->relayed;
    }
  (method == kCopyFromPeer ? steps_.by.sharedMemory : steps_.by.messages) += step.bytes();
  if (method == kReceive && shortcut_ && peer != addresses_.end() && !relayed)
    steps_.by.messagesInsideHost += step.bytes();
  return method;
}

Status RunStepsBuilder::addOperands(MessageState &message, uint32_t number, bool sends) {
  const Step &step = *message.step;
  const uint32_t first = sends ? step.first_input() : step.first_output(),
                 count = sends ? step.input_count() : step.output_count();
  for (uint32_t i = 0; i < count; ++i)
    if (Status status = message.packing.add(rank_, *rank_.segment->operands()->Get(first + i)); !status.ok())
      return status;
  if (chunkBytes(step, 0) > kMaxChannelBytes)
    return failed("step " + std::to_string(number) + " has chunks of " + std::to_string(chunkBytes(step, 0)) +
                  " bytes, expected at most " + std::to_string(kMaxChannelBytes));
  if (step.staging() == UINT64_MAX && !message.packing.contiguous())
    return failed("step " + std::to_string(number) + " sends or receives in place, but its bytes are not contiguous");
  return {};
}

Result<RunStepsBuilder::SenderMemory> RunStepsBuilder::pairWithSender(const LocalRank &other, MessageState &message) {
  const Step &step = *message.step;
  const auto *steps = other.segment->steps();
  const auto send = std::find_if(steps->begin(), steps->end(), [&](const Step *s) {
    return s->kind() == StepKind::send && s->message() == step.message();
  });
  if (send == steps->end() || send->peer() != rank_.rank || send->input_count() != step.output_count() ||
      send->bytes() != step.bytes() || send->chunk() != step.chunk())
    return failed("message " + std::to_string(step.message()) + " differs between rank " + std::to_string(other.rank) +
                  " and rank " + std::to_string(rank_.rank) +
                  ": expected equal peers, bytes, chunks and operand counts");
  SenderMemory memory;
  for (uint32_t i = 0; i < send->input_count(); ++i)
    memory.relayed = memory.relayed || other.segment->operands()->Get(send->first_input() + i)->buffer() == 0;
  for (uint32_t i = 0; i < step.output_count() && memory.mapped; ++i) {
    const Result<bool> mapped = message.packing.add({&other, other.segment->operands()->Get(send->first_input() + i)},
                                                    {&rank_, rank_.segment->operands()->Get(step.first_output() + i)});
    if (!mapped.ok())
      return mapped.status();
    memory.mapped = *mapped;
  }
  if (!memory.mapped) {
    message.packing = {};
    message.peerSlots = peers_.slots(other.rank, **send);
    message.peerSlot = send->slot();
  }
  if (memory.mapped || message.peerSlots) {
    message.progress = &peers_.progress(other.rank, static_cast<uint32_t>(send - steps->begin()));
    message.progress->copiedFrom = memory.mapped ? CopiedFrom::boundMemory : CopiedFrom::slots;
  }
  return memory;
}

void RunStepsBuilder::link() {
  for (const Method method : {kReceive, kSend, kCopyFromPeer, kPublish})
    for (MessageState &message : steps_.messages[method])
      linkStep(method, message);
  for (MessageState &local : steps_.locals)
    linkStep(kLocal, local);
}

void RunStepsBuilder::linkStep(Method method, MessageState &message) const {
  const Segment &segment = *rank_.segment;
  const bool send = method == kSend || method == kPublish;
  const std::vector<std::vector<uint64_t>> before =
      send ? chunksBefore(segment, *message.step) : std::vector<std::vector<uint64_t>>();
  for (uint32_t i = 0; i < message.step->after_count(); ++i) {
    const uint32_t earlier = segment.after()->Get(message.step->first_after() + i);
    const StepKind kind = segment.steps()->Get(earlier)->kind();
    if (kind == message.step->kind())
      addSharing(method, earlier, message);
    else if (send)
      message.dependencies.emplace_back(earlier, before[i]);
    else
      message.dependencies.emplace_back(
          earlier, std::vector<uint64_t>(message.chunks, chunkCount(*segment.steps()->Get(earlier))));
  }
}

void RunStepsBuilder::addSharing(Method method, uint32_t earlier, MessageState &message) const {
  if (method != kSend && method != kReceive)
    return;
  const Segment &segment = *rank_.segment;
  std::set<uint32_t> seen = {earlier};
  std::vector<uint32_t> left = {earlier};
  while (!left.empty()) {
    const uint32_t number = left.back();
    left.pop_back();
    if (steps_.where[number].first == method) {
      message.sharing.push_back(static_cast<uint32_t>(steps_.where[number].second));
      continue;
    }
    const Step &step = *segment.steps()->Get(number);
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const uint32_t before = segment.after()->Get(step.first_after() + i);
      if (segment.steps()->Get(before)->kind() == step.kind() && seen.insert(before).second)
        left.push_back(before);
    }
  }
}

} // namespace reshard
