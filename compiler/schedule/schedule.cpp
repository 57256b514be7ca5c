// SPDX-License-Identifier: Apache-2.0
// schedule: turns descriptors into the steps of each rank, in three phases (flows.h, message_plan.h, rank_steps.h). The
// ranks are then a stream, which makes each when it is asked for; or stored, if the steps of a rank depend on those of
// others.

#include "compiler/pass.h"
#include "compiler/schedule/flows.h"
#include "compiler/schedule/message_plan.h"
#include "compiler/schedule/rank_schedules.h"
#include "compiler/schedule/rank_steps.h"
#include "compiler/transfer/lists.h"
#include "schema/step_rules.h"

#include <algorithm>
#include <array>
#include <mutex>

namespace reshard {

using namespace ir;

namespace {

/// Turns steps of a first rank into steps of the rank that repeats them in a copy of the source.
void repeatInCopy(const RankCopies &copies, const MessagePlan &plan, int64_t copy, std::vector<Step> &steps) {
  if (copy == 0)
    return;
  for (Step &step : steps)
    if (step.peer >= 0) {
      step.peer = copies.repeating(step.peer, copy);
      step.message += static_cast<uint32_t>(copy * static_cast<int64_t>(plan.count()));
    }
}

/// The operands of the messages of the first period. Those of all periods are equal: a sender repeats its messages, and
/// the copies of a target have equal buffers. The shapes are numbered for each sender, and for each rank of the first
/// copy of the target.
class PeriodOperands {
public:
  /// Collects nothing if there are no periods, or very many operands: the copies are then few.
  PeriodOperands(const Flows &flows, const MessagePlan &plan, RankOperands &numbered) : flows_(flows), plan_(plan) {
    constexpr size_t kMaxOperands = 2 << 20; // an operand has 16 bytes
    if (plan.periods == 1)
      return;
    size_t count = 0;
    for (const Message &message : plan.messages)
      for (const Grant &grant : message.grants)
        count += 2 * RankSteps::rangesOf(flows, grant).size();
    if (count > kMaxOperands)
      return;
    operands_.reserve(count);
    for (const Message &message : plan.messages)
      for (const bool receive : {false, true}) {
        firsts_.push_back(static_cast<uint32_t>(operands_.size()));
        for (const Grant &grant : message.grants)
          for (const FlowRange &range : RankSteps::rangesOf(flows, grant)) {
            const Descriptor &d = flows.descriptors[range.descriptor];
            operands_.push_back(receive
                                    ? numbered.numbered(flows.keys[grant.flow].target, numbered.output(message.to, d))
                                    : numbered.numbered(message.from, numbered.input(message.from, d)));
          }
      }
    firsts_.push_back(static_cast<uint32_t>(operands_.size()));
    for (int32_t rank = 0; rank < flows.layout.world; ++rank)
      shapes_.push_back(numbered.takeShapes(rank));
  }

  bool empty() const { return operands_.empty(); }

  /// Appends the steps that RankSteps::addMessages() makes: no step waits for another. `used`: steps whose memory of
  /// operands is reused.
  void addMessages(int32_t rank, RankOperands &numbered, std::vector<Step> &used, std::vector<Step> &steps) const {
    const std::vector<OperandShape> &shapes = shapes_[flows_.copies.inFirstTarget(rank)];
    std::vector<uint32_t> numbers(shapes.size(), UINT32_MAX); // by shape: its number on this rank
    const std::vector<MessageSide> &sides = plan_.sides[rank];
    steps.reserve(steps.size() + sides.size());
    for (const MessageSide &side : sides) {
      const size_t number = steps.size(), repeated = 2 * (side.message % plan_.messages.size()) + side.receive;
      Step &step = steps.emplace_back(side.step(rank, plan_.of(side.message), flows_.layout.world));
      Operands &operands = side.receive ? step.outputs : step.inputs;
      if (number < used.size())
        operands = std::move(side.receive ? used[number].outputs : used[number].inputs);
      operands.assign(operands_.begin() + firsts_[repeated], operands_.begin() + firsts_[repeated + 1]);
      for (Operand &operand : operands) {
        uint32_t &shape = numbers[operand.shape];
        if (shape == UINT32_MAX)
          shape = numbered.shape(rank, shapes[operand.shape]);
        operand.shape = shape;
      }
    }
  }

private:
  const Flows &flows_;
  const MessagePlan &plan_;
  std::vector<Operand> operands_;                 // message after message: what it sends, then what it receives
  std::vector<uint32_t> firsts_;                  // by message and side: its first in operands_
  std::vector<std::vector<OperandShape>> shapes_; // by rank
};

/// Makes each rank when it is asked for.
class RankStream : public RankSchedules {
public:
  RankStream(std::unique_ptr<Flows> flows, MessagePlan plan)
      : flows_(std::move(flows)), plan_(std::move(plan)), steps_(*flows_, plan_),
        period_(*flows_, plan_, steps_.operands()) {}

  size_t size() const override { return static_cast<size_t>(flows_->layout.world); }

  const RankSchedule &get(size_t number, RankSchedule &schedule) override {
    const auto rank = static_cast<int32_t>(number);
    const auto [first, copy] = flows_->copies.first(rank);
    std::vector<Step> used = std::move(schedule.steps);
    {
      const std::lock_guard lock(mutexes_[static_cast<size_t>(first) % mutexes_.size()]);
      steps_.addLocal(first);
      if (period_.empty())
        steps_.addMessages(first);
      else
        period_.addMessages(first, steps_.operands(), used, steps_.of(first));
      schedule.steps = std::exchange(steps_.of(first), {});
      schedule.shapes = steps_.operands().takeShapes(first);
    }
    schedule.rank = rank;
    schedule.buffers = flows_->buffers.of(rank);
    schedule.arenaBytes = 0;
    repeatInCopy(flows_->copies, plan_, copy, schedule.steps);
    if (staged_)
      assignRankStaging(schedule, flows_->layout);
    return schedule;
  }

  size_t operands(size_t rank) const override {
    constexpr size_t kOfMessage = 4;
    return plan_.sides[flows_->copies.first(static_cast<int32_t>(rank)).rank].size() * kOfMessage;
  }

  llvm::Error assignStaging(const Layout &) override {
    staged_ = true; // by get(); there is no limit
    return llvm::Error::success();
  }

private:
  std::unique_ptr<Flows> flows_;
  const MessagePlan plan_;
  RankSteps steps_;
  const PeriodOperands period_;
  bool staged_ = false;                // whether get() assigns staging
  std::array<std::mutex, 64> mutexes_; // protect the ranks whose steps get() makes
};

/// Makes all ranks, in `schedule`.
llvm::Error makeAllRanks(const Flows &flows, MessagePlan &plan, Schedule &schedule) {
  const auto world = static_cast<int32_t>(flows.layout.world);
  RankSteps steps(flows, plan);
  schedule.ranks.reserve(static_cast<size_t>(world));
  for (int32_t rank = 0; rank < world; ++rank)
    steps.addLocal(rank);
  steps.addReads();
  for (int32_t rank = 0; rank < world; ++rank) {
    steps.addMessages(rank);
    freeMemory(plan.sides[rank]); // the steps of the next ranks take its place
  }
  for (int32_t rank = 0; rank < world; ++rank) {
    schedule.ranks.push_back({rank, flows.buffers.of(rank), steps.operands().takeShapes(rank),
                              std::move(steps.of(rank)), flows.staged.bytes(rank) + flows.relays.held(rank)});
    if (!schedule.ranks.back().steps.empty())
      schedule.rounds = std::max(schedule.rounds, 1u);
  }
  const uint64_t levels = assignDependencyLevels(schedule);
  if (levels > schema::kMaxLevels)
    return llvm::createStringError("the steps have " + std::to_string(levels) +
                                   " dependency levels, expected at most " + std::to_string(schema::kMaxLevels) +
                                   "; raise options.staging, or choose another options.exchange");
  for (RankSchedule &rank : schedule.ranks)
    if (const auto [first, copy] = flows.copies.first(rank.rank); copy > 0) {
      const RankSchedule &repeated = schedule.ranks[static_cast<size_t>(first)];
      rank.shapes = repeated.shapes;
      rank.steps = repeated.steps;
      rank.arenaBytes = repeated.arenaBytes;
      repeatInCopy(flows.copies, plan, copy, rank.steps);
    }
  return llvm::Error::success();
}

} // namespace

llvm::Error schedule(Module &module, std::unique_ptr<RankSchedules> &ranks) {
  llvm::Expected<std::unique_ptr<Flows>> flows = makeFlows(module);
  if (!flows)
    return flows.takeError();
  llvm::Expected<MessagePlan> plan = planMessages(**flows);
  if (!plan)
    return plan.takeError();
  module.schedule.messages =
      static_cast<uint32_t>(plan->count() * static_cast<uint64_t>((*flows)->copies.copies().sources()));
  module.schedule.rounds = (*flows)->local.empty() ? plan->rounds : std::max(plan->rounds, 1u);
  if ((*flows)->independentRanks()) {
    ranks = std::make_unique<RankStream>(std::move(*flows), std::move(*plan));
  } else {
    Schedule all{module.schedule.rounds, module.schedule.messages, {}};
    if (llvm::Error error = makeAllRanks(**flows, *plan, all))
      return error;
    module.schedule.rounds = all.rounds;
    ranks = std::make_unique<StoredRanks>(std::move(all.ranks));
  }
  module.level = Level::schedule;
  return llvm::Error::success();
}

} // namespace reshard
