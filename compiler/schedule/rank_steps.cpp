// SPDX-License-Identifier: Apache-2.0
// Makes fills with zeros, local copies, sends and receives, with their operands and the steps that they wait for.
#include "compiler/schedule/rank_steps.h"

#include <algorithm>

namespace reshard {

using namespace ir;

Operand RankOperands::input(int32_t rank, const Descriptor &d) const {
  return {flows_.buffers.first(rank, 0, d.source) + d.sourceInstance, sideShape(d.shape, false), d.sourceOffset};
}

Operand RankOperands::output(int32_t rank, const Descriptor &d) const {
  if (const StagedRange *staged = flows_.staged.find(d.endpoint, d.target, d.targetInstance, d.targetOffset))
    return {0, sideShape(d.shape, true), staged->offset + d.targetOffset - staged->begin};
  const int32_t own = flows_.copies.targetOn(rank), meshRank = own < 0 ? d.target : own; // in its own copy
  return {flows_.buffers.first(rank, d.endpoint, meshRank) + d.targetInstance, sideShape(d.shape, true),
          d.targetOffset};
}

Operand RankOperands::forwarded(int32_t rank, const Descriptor &d) const {
  const int32_t target = flows_.keyOf.rankOf(d.endpoint, d.target);
  if (rank == target)
    return output(rank, d);
  const BufferRange &range = flows_.buffers.targetOf(target, d);
  const std::vector<BufferRange> &ranges = flows_.buffers.of(rank);
  const auto same = std::find_if(ranges.begin(), ranges.end(), [&](const BufferRange &r) {
    return r.endpoint == d.endpoint && r.param == range.param;
  });
  const uint32_t instance = flows_.buffers.first(target, d.endpoint, d.target) + d.targetInstance - range.first;
  return {same->first + instance, sideShape(d.shape, true), d.targetOffset};
}

Operand RankOperands::numbered(int32_t rank, Operand operand) {
  auto [at, added] = numbers_[rank].try_emplace(operand.shape);
  if (added) {
    const Shape &shape = flows_.shapes[operand.shape / 2];
    OperandShape result{shape.rowBytes, {}};
    for (const Loop &loop : shape.loops)
      result.loops.push_back(operand.shape % 2 == 1 ? OperandLoop{loop.count, loop.targetStride, loop.targetStep}
                                                    : OperandLoop{loop.count, loop.sourceStride, loop.sourceStep});
    at->second = this->shape(rank, std::move(result));
  }
  operand.shape = at->second;
  return operand;
}

uint32_t RankOperands::packed(int32_t rank, uint32_t number) {
  const Shape &shape = flows_.shapes[number];
  OperandShape operand{shape.rowBytes, {}};
  int64_t stride = bytesOf(shape);
  for (const Loop &loop : shape.loops)
    operand.loops.push_back({loop.count, stride /= loop.count, 0});
  return this->shape(rank, std::move(operand));
}

std::vector<OperandShape> RankOperands::takeShapes(int32_t rank) {
  numbers_[rank].clear();
  return std::move(std::exchange(shapes_[rank], {})).take();
}

void PhaseSteps::append(int32_t rank, Step step, const EpochPhase &when) {
  std::vector<Step> &steps = steps_[rank];
  const auto number = static_cast<uint32_t>(steps.size());
  State &at = state_[rank];
  const Needs needs = this->needs(rank, step);
  if (needs.writesStaged && at.converted >= 0)
    step.after.push_back(static_cast<uint32_t>(at.converted));
  if (needs.tensorScales && at.reduced >= 0)
    step.after.push_back(static_cast<uint32_t>(at.reduced));
  if (needs.writesStaged)
    at.writers[when].push_back(number);
  if (needs.writesAmax)
    at.amax[when.epoch].push_back(number);
  std::sort(step.after.begin(), step.after.end());
  step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
  steps.push_back(std::move(step));
}

/// Determined from the step's outputs.
PhaseSteps::Needs PhaseSteps::needs(int32_t rank, const Step &step) {
  Needs needs;
  const std::vector<BufferRange> &ranges = buffers_.of(rank);
  const bool hasViews = state_[rank].hasViews;
  for (const Operand &operand : step.outputs) {
    needs.writesStaged = needs.writesStaged || operand.buffer == 0;
    if (operand.buffer == 0 || !hasViews)
      continue;
    const BufferRange &range = bufferRange(ranges, operand.buffer);
    const Param &param = layout_.endpoints[range.endpoint].params[range.param];
    needs.writesAmax = needs.writesAmax || (param.view && param.view->kind == ViewKind::amax);
    needs.tensorScales = needs.tensorScales || staged_.phaseOf(param) > 0;
  }
  return needs;
}

void PhaseSteps::appendIfAny(int32_t rank, Step step, uint32_t round, const std::vector<uint32_t> &after,
                             int64_t &number) {
  if (step.inputs.empty())
    return;
  std::vector<Step> &steps = steps_[rank];
  step.round = round;
  step.after.assign(after.begin(), after.end());
  number = static_cast<int64_t>(steps.size());
  steps.push_back(std::move(step));
}

void PhaseSteps::finish(int32_t rank, const EpochPhase &when, uint32_t round) {
  const auto &endpoints = layout_.endpoints;
  State &at = state_[rank];
  auto whole = [&](int64_t bytes) { return operands_.shape(rank, {bytes, {}}); };
  std::map<std::pair<unsigned, int32_t>, uint32_t> firsts; // by endpoint and mesh rank: the first buffer
  Step reduce, convert;
  reduce.kind = StepKind::reduce;
  for (const BufferRange &range : buffers_.of(rank)) {
    const uint32_t first = firsts.try_emplace({range.endpoint, range.meshRank}, range.first).first->second;
    const auto &view = endpoints[range.endpoint].params[range.param].view;
    if (when.phase > 0 || range.endpoint == 0 || range.bytes == 0 || !view || view->kind != ViewKind::amax ||
        endpoints[range.endpoint].epoch(range.meshRank) != when.epoch)
      continue;
    for (uint32_t i = 0; i < range.count; ++i)
      if (staged_.writer(range.endpoint, range.meshRank, range.first + i - first) == rank) {
        reduce.inputs.push_back({range.first + i, whole(range.bytes), 0});
        reduce.bytes += range.bytes;
      }
  }
  appendIfAny(rank, std::move(reduce), round, at.amax[when.epoch], at.reduced);
  bool tensorScales = false;
  for (const StagedRange &staged : staged_.of(rank)) {
    if (staged.phase != when.phase || endpoints[staged.endpoint].epoch(staged.meshRank) != when.epoch)
      continue;
    const uint32_t shape = whole(staged.end - staged.begin);
    convert.inputs.push_back({0, shape, staged.offset});
    convert.outputs.push_back({firsts.at({staged.endpoint, staged.meshRank}) + staged.instance, shape, staged.begin});
    convert.bytes += staged.end - staged.begin;
    tensorScales =
        tensorScales ||
        staged_.phaseOf(
            endpoints[staged.endpoint].params[staged_.paramOf(staged.endpoint, staged.meshRank, staged.instance)]) > 0;
  }
  std::vector<uint32_t> after = at.writers[when];
  if (tensorScales && at.reduced >= 0)
    after.push_back(static_cast<uint32_t>(at.reduced));
  if (at.converted >= 0) // a step that waits for this one then waits for all earlier ones
    after.push_back(static_cast<uint32_t>(at.converted));
  std::sort(after.begin(), after.end());
  appendIfAny(rank, std::move(convert), round, after, at.converted);
}

RankSteps::RankSteps(const Flows &flows, const MessagePlan &plan)
    : flows_(flows), plan_(plan), operands_(flows), steps_(flows.layout.world), phaseSteps_(flows, operands_, steps_),
      later_(flows.layout.world), receiveSteps_(plan.arrivals.empty() ? 0 : plan.count()) {
  const std::vector<Endpoint> &endpoints = flows.layout.endpoints;
  for (int32_t rank = 0; rank < flows.layout.world; ++rank)
    for (const BufferRange &range : flows.buffers.of(rank))
      if (const auto &view = endpoints[range.endpoint].params[range.param].view; range.endpoint > 0 && view) {
        phaseSteps_.watch(rank);
        if (view->kind == ViewKind::amax)
          later_[rank][{endpoints[range.endpoint].epoch(range.meshRank), 0}];
      }
}

/// Loads what the sides after number `i` of a rank will need, and the first ones of the next rank. Messages are
/// ordered by round and flows by sender, so that those of a rank lie far apart; waiting for memory would be a fifth
/// of the compiler's time in a job of a million messages. Inlined, because GCC removes a call of a function that does
/// nothing else.
LLVM_ATTRIBUTE_ALWAYS_INLINE void RankSteps::prefetch(size_t rank, size_t i) const {
  constexpr size_t kMessage = 16, kFlow = 12, kRange = 8, kDescriptor = 4; // sides ahead
  constexpr size_t kMaxDescriptors = 8;
  auto messageAhead = [&](size_t ahead) -> const Message * { // null if neither this rank nor the next one has it
    const std::vector<std::vector<MessageSide>> &sides = plan_.sides;
    const size_t own = sides[rank].size();
    if (i + ahead < own)
      return &plan_.of(sides[rank][i + ahead].message);
    const size_t next = i + ahead - own;
    return rank + 1 < sides.size() && next < sides[rank + 1].size() ? &plan_.of(sides[rank + 1][next].message)
                                                                    : nullptr;
  };
  if (const Message *const message = messageAhead(kMessage)) {
    __builtin_prefetch(message);
    __builtin_prefetch(reinterpret_cast<const char *>(message + 1) - 1); // it lies in two cache lines
  }
  if (const Message *const message = messageAhead(kFlow)) {
    const uint32_t flow = message->grants[0].flow;
    flows_.descriptors.prefetchFlow(flow);
    __builtin_prefetch(&flows_.flows[flow]);
    __builtin_prefetch(&flows_.keys[flow]);
  }
  if (const Message *const message = messageAhead(kRange))
    flows_.descriptors.prefetchRanges(message->grants[0].flow);
  if (const Message *const message = messageAhead(kDescriptor))
    flows_.descriptors.prefetchDescriptors(message->grants[0].flow, kMaxDescriptors);
}

llvm::ArrayRef<FlowRange> RankSteps::rangesOf(const Flows &flows, const Grant &grant) {
  const llvm::ArrayRef<FlowRange> ranges = flows.descriptors.ranges(grant.flow);
  const auto first = std::partition_point(ranges.begin(), ranges.end(),
                                          [&](const FlowRange &range) { return range.begin < grant.begin; });
  const auto last =
      std::partition_point(first, ranges.end(), [&](const FlowRange &range) { return range.begin < grant.end; });
  return {first, last};
}

void RankSteps::addLocal(int32_t rank) {
  std::map<EpochPhase, Step> fills, copies;
  for (const LocalDescriptor &local : flows_.localOf(rank)) {
    const Descriptor &d = local.descriptor;
    const FlowKey at = flows_.keyOf(d);
    const EpochPhase when = at.when.phase > 0 || flows_.keyOf.hasViews(d.endpoint) ? at.when : EpochPhase{0, 0};
    Step &step = (d.source < 0 ? fills : copies)[when];
    step.kind = d.source < 0 ? StepKind::fill : StepKind::copy;
    if (d.source >= 0)
      step.inputs.push_back(operands_.numbered(rank, operands_.input(rank, d)));
    step.outputs.push_back(operands_.numbered(rank, operands_.output(rank, d)));
    step.bytes += bytesOf(flows_.shapes[d.shape]);
  }
  for (const StagedRange &staged : flows_.staged.of(rank)) // also phases without local steps must be finished
    later_[rank][{flows_.layout.endpoints[staged.endpoint].epoch(staged.meshRank), staged.phase}];
  for (auto *kind : {&fills, &copies})
    for (auto &[when, step] : *kind)
      if (when == EpochPhase{0, 0})
        phaseSteps_.append(rank, std::move(step), {});
      else
        later_[rank][when].push_back(std::move(step));
}

void RankSteps::addReads() {
  readSteps_.resize(flows_.keys.size());
  for (size_t flow = 0; flow < flows_.keys.size(); ++flow) {
    if (!flows_.keys[flow].reads())
      continue;
    const int32_t rank = flows_.keys[flow].source;
    readSteps_[flow] = static_cast<uint32_t>(steps_[rank].size());
    Step step;
    step.bytes = flows_.flows[flow].bytes;
    for (const FlowRange &range : flows_.descriptors.ranges(flow)) {
      const Descriptor &d = flows_.descriptors[range.descriptor];
      step.inputs.push_back(operands_.numbered(rank, operands_.input(rank, d)));
      step.outputs.push_back(operands_.numbered(rank, operands_.output(rank, d)));
    }
    phaseSteps_.append(rank, std::move(step), {});
  }
}

void RankSteps::addMessages(int32_t rank) {
  const std::vector<MessageSide> &sides = plan_.sides[rank];
  std::vector<Step> &steps = steps_[rank];
  steps.reserve(steps.size() + sides.size());
  auto side = sides.begin();
  schema::ArenaUse held;            // the steps that use the arena for relayed bytes
  auto until = [&](int64_t round) { // appends the messages of rounds up to this one
    for (; side != sides.end() && side->round <= round; ++side) {
      prefetch(rank, static_cast<size_t>(side - sides.begin()));
      const Message &message = plan_.of(side->message);
      Step step = side->step(rank, message, flows_.layout.world);
      for (const Grant &grant : message.grants)
        addOperands(rank, grant, held, step);
      phaseSteps_.append(rank, std::move(step), flows_.keys[message.grants[0].flow].when);
      if (side->receive && !receiveSteps_.empty())
        receiveSteps_[side->message] = static_cast<uint32_t>(steps.size() - 1);
    }
  };
  int64_t before = -1;
  auto known = plan_.lastRound.begin();
  for (auto &[when, locals] : later_[rank]) {
    for (; known != plan_.lastRound.end() && known->first < when; ++known)
      before = std::max<int64_t>(before, known->second);
    const bool rounds = known != plan_.lastRound.end() && known->first == when;
    until(before);
    for (Step &step : locals) {
      step.round = static_cast<uint32_t>(std::max<int64_t>(rounds ? before + 1 : before, 0));
      phaseSteps_.append(rank, std::move(step), when);
    }
    if (rounds)
      until(known->second);
    phaseSteps_.finish(rank, when, static_cast<uint32_t>(std::max<int64_t>(rounds ? known->second : before, 0)));
  }
  until(INT64_MAX);
}

/// Adds the operands of a grant to a send or receive, and the steps that it waits for. `held`: the steps of the rank
/// that use the arena for relayed bytes.
void RankSteps::addOperands(int32_t rank, const Grant &grant, schema::ArenaUse &held, Step &step) {
  const bool receive = step.kind == StepKind::recv;
  const llvm::ArrayRef<FlowRange> ranges = rangesOf(flows_, grant);
  Operands &operands = receive ? step.outputs : step.inputs;
  operands.reserve(operands.size() + ranges.size());
  const int32_t after = flows_.flows[grant.flow].hops[grant.hop].after;
  const int64_t routed = static_cast<int64_t>(grant.hop) - hopsBefore(grant.flow);
  const bool onRoute = routed >= 0, relayed = flows_.keys[grant.flow].relay >= 0 && grant.hop == (receive ? 0 : 1);
  for (const FlowRange &range : ranges) {
    const Descriptor &d = flows_.descriptors[range.descriptor];
    if (relayed) {
      const int64_t begin = flows_.relays.base(grant.flow) + range.begin, end = begin + bytesOf(flows_.shapes[d.shape]);
      operands.push_back({0, operands_.packed(rank, d.shape), begin});
      // A send waits for its bytes, a receive for its memory.
      held.take(begin, end, static_cast<uint32_t>(steps_[rank].size()),
                [&](uint32_t earlier) { step.after.push_back(earlier); });
    } else if (receive)
      operands.push_back(operands_.numbered(rank, onRoute ? operands_.forwarded(rank, d) : operands_.output(rank, d)));
    else
      operands.push_back(operands_.numbered(rank, onRoute ? operands_.forwarded(rank, d) : operands_.input(rank, d)));
  }
  if (receive || !onRoute)
    return;
  if (after < 0) {
    step.after.push_back(readSteps_[grant.flow]);
    return;
  }
  const auto &list = plan_.arrivals[grant.flow][after]; // ascending ends
  auto bringing = std::upper_bound(list.begin(), list.end(), grant.begin,
                                   [](int64_t begin, const auto &each) { return begin < each.first; });
  for (; bringing != list.end(); ++bringing) {
    step.after.push_back(receiveSteps_[bringing->second]);
    if (bringing->first >= grant.end)
      break;
  }
}

} // namespace reshard
