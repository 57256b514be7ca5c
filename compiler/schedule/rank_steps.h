// SPDX-License-Identifier: Apache-2.0
// The third phase of the pass schedule: the steps of each rank.
#pragma once

#include "compiler/resolve/interner.h"
#include "compiler/schedule/flows.h"
#include "compiler/schedule/message_plan.h"
#include "ir/ir.h"
#include "schema/step_rules.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/DenseMap.h"

#include <map>
#include <utility>
#include <vector>

namespace reshard {

/// The operands of steps. Each rank numbers the shapes that its operands have.
class RankOperands {
public:
  explicit RankOperands(const Flows &flows)
      : flows_(flows), shapes_(flows.layout.world), numbers_(flows.layout.world) {}

  // The shape of these operands is the number of one side of the descriptor's shape, which numbered() replaces.
  ir::Operand input(int32_t rank, const ir::Descriptor &d) const;
  ir::Operand output(int32_t rank, const ir::Descriptor &d) const;
  /// The target's operand on another rank of the route, which has one mesh rank of the target: the same positions of
  /// the same param.
  ir::Operand forwarded(int32_t rank, const ir::Descriptor &d) const;
  /// Replaces the side of a shape by the number of its operand shape on a rank.
  ir::Operand numbered(int32_t rank, ir::Operand operand);
  /// The number, on a rank, of the shape of an operand in a relay's arena: the same loops, with contiguous rows.
  uint32_t packed(int32_t rank, uint32_t shape);
  /// The number of an operand shape on a rank.
  uint32_t shape(int32_t rank, ir::OperandShape shape) { return shapes_[rank].intern(std::move(shape)); }
  /// The operand shapes of a rank, which has none afterwards.
  std::vector<ir::OperandShape> takeShapes(int32_t rank);

private:
  static uint32_t sideShape(uint32_t shape, bool target) { return shape * 2 + target; }

  const Flows &flows_;
  std::vector<Interner<ir::OperandShape>> shapes_;                  // by rank
  std::vector<llvm::SmallDenseMap<uint32_t, uint32_t, 4>> numbers_; // by rank: sideShape() -> operand shape
};

/// Appends steps to the lists of ranks with the dependences between phases, and the steps that convert the
/// elements that a phase staged.
class PhaseSteps {
public:
  /// `steps`: the lists, by rank. `operands` numbers the shapes of operands.
  PhaseSteps(const Flows &flows, RankOperands &operands, std::vector<std::vector<ir::Step>> &steps)
      : layout_(flows.layout), buffers_(flows.buffers), staged_(flows.staged), operands_(operands), steps_(steps),
        state_(layout_.world) {}

  /// States that a rank has quantized views of a target.
  void watch(int32_t rank) { state_[rank].hasViews = true; }
  /// Appends a step of a phase. It waits for the steps of earlier phases that it depends on.
  void append(int32_t rank, ir::Step step, const EpochPhase &when);
  /// Appends the steps that follow all others of a phase: a reduce, which computes tensor scales from amax, and a copy,
  /// which quantizes the staged elements.
  void finish(int32_t rank, const EpochPhase &when, uint32_t round);

private:
  /// The memory that a step writes, and the values that it needs.
  struct Needs {
    bool writesStaged = false; // writes staged elements or relayed bytes (buffer 0)
    bool writesAmax = false;
    bool tensorScales = false; // quantizes with tensor scales
  };
  /// The steps of a rank that later steps wait for, by their numbers.
  struct State {
    bool hasViews = false;
    std::map<EpochPhase, std::vector<uint32_t>> writers; // write staged elements of a phase
    std::map<uint32_t, std::vector<uint32_t>> amax;      // write amax of an epoch
    int64_t converted = -1, reduced = -1;                // the last that converted and that reduced; -1: none
  };
  Needs needs(int32_t rank, const ir::Step &step);
  /// Appends a step that has inputs, and sets `number` to its number; ignores a step that has none.
  void appendIfAny(int32_t rank, ir::Step step, uint32_t round, const std::vector<uint32_t> &after, int64_t &number);

  const ir::Layout &layout_;
  const RankBuffers &buffers_;
  const StagedRanges &staged_;
  RankOperands &operands_;
  std::vector<std::vector<ir::Step>> &steps_;
  std::vector<State> state_; // by rank
};

/// Makes the steps of ranks. Those of different ranks may be made at the same time if Flows::independentRanks().
class RankSteps {
public:
  RankSteps(const Flows &flows, const MessagePlan &plan);

  /// The ranges of a flow's descriptors that a grant sends.
  static llvm::ArrayRef<FlowRange> rangesOf(const Flows &flows, const Grant &grant);

  /// Makes one fill and one copy step of a rank for each phase. They run in the first round of their phase.
  void addLocal(int32_t rank);
  /// Makes one copy step for each flow that a rank reads from files to forward it, in the first round: after
  /// addLocal() of all ranks.
  void addReads();
  /// Makes a send for each message from a rank, and a receive for each message to it. A send of forwarded bytes waits
  /// for the receives that brought them. The steps of a phase follow the steps of earlier phases. If a rank depends on
  /// others, after addReads() and in the order of ranks.
  void addMessages(int32_t rank);

  std::vector<ir::Step> &of(int32_t rank) { return steps_[rank]; }
  RankOperands &operands() { return operands_; }

private:
  LLVM_ATTRIBUTE_ALWAYS_INLINE void prefetch(size_t rank, size_t i) const;
  void addOperands(int32_t rank, const Grant &grant, schema::ArenaUse &held, ir::Step &step);
  /// The number of hops of a flow before its route.
  uint32_t hopsBefore(size_t flow) const {
    const FlowKey &at = flows_.keys[flow];
    return at.reads() ? 0 : at.relay >= 0 ? 2 : 1;
  }

  const Flows &flows_;
  const MessagePlan &plan_;
  RankOperands operands_;
  std::vector<std::vector<ir::Step>> steps_; // by rank
  PhaseSteps phaseSteps_;
  std::vector<std::map<EpochPhase, std::vector<ir::Step>>> later_; // by rank: the local steps of phases after the first
  std::vector<uint32_t> readSteps_;                                // by flow: the step that reads it from files
  std::vector<uint32_t> receiveSteps_; // by message: the number of its receive among the steps of its rank; empty if
                                       // no flow is forwarded
};

/// Sets the dependency level of each step: 0 if it waits for nothing, else one more than the greatest level of the
/// steps in its `after` that raise it (schema/step_rules.h). A send and its receive have one level. Returns the number
/// of levels; the levels are valid only if these are at most schema::kMaxLevels. Time: linear in steps and `after`.
uint64_t assignDependencyLevels(ir::Schedule &schedule);

} // namespace reshard
