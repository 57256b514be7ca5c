// SPDX-License-Identifier: Apache-2.0
// assign-staging: gives every message a fixed offset in the rank's arena. A message that is one contiguous range of a
// param needs no staging: it is sent from the param, or received into it. The other messages use two slots for each
// direction and link tier. Chunks alternate between the two slots, so that one chunk is packed or unpacked while the
// next is sent or received. A step that uses bytes of the arena waits for the steps that used them before.

#include "compiler/pass.h"
#include "compiler/schedule/flows.h"
#include "compiler/schedule/rank_schedules.h"
#include "compiler/transfer/staging.h"
#include "schema/step_rules.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

int64_t operandBytes(const OperandShape &shape) {
  int64_t bytes = shape.rowBytes;
  for (const OperandLoop &loop : shape.loops)
    bytes *= loop.count;
  return bytes;
}

/// Whether an operand is in the arena, with its rows contiguous.
bool contiguousInArena(const RankSchedule &rank, const Operand &operand) {
  const OperandShape &shape = rank.shapes[operand.shape];
  int64_t stride = operandBytes(shape);
  return operand.buffer == 0 && std::all_of(shape.loops.begin(), shape.loops.end(), [&](const OperandLoop &loop) {
           return loop.stride == (stride /= loop.count);
         });
}

/// Whether a message is sent from, or received into, its operand directly: the operand is contiguous, and its bytes are
/// not converted when they are read or written.
bool inPlace(const Layout &layout, const RankSchedule &rank, const Step &step) {
  const Operands &operands = step.kind == StepKind::send ? step.inputs : step.outputs;
  if (operands.size() != 1 || !(rank.shapes[operands[0].shape].loops.empty() || contiguousInArena(rank, operands[0])))
    return false;
  if (operands[0].buffer == 0) // staged elements or relayed bytes
    return true;
  const BufferRange &range = bufferRange(rank.buffers, operands[0].buffer);
  return !layout.endpoints[range.endpoint].params[range.param].converts();
}

int64_t chunks(const Step &step) { return step.chunk > 0 ? (step.bytes + step.chunk - 1) / step.chunk : 1; }

/// The two slots between which the chunks of one direction and link tier alternate.
struct Slots {
  int64_t bytes = 0;  // the length of each slot
  int64_t base = 0;   // offset of the first slot in the arena
  int64_t chunks = 0; // chunks assigned so far
};

void assign(RankSchedule &rank, const Layout &layout) {
  const Topology &topology = layout.topology;
  Slots all[4];
  auto slotsOf = [&](const Step &step) -> Slots & {
    return all[2 * (step.kind == StepKind::recv) + (topology.node(rank.rank) == topology.node(step.peer))];
  };
  auto isStaged = [&](const Step &step) {
    return (step.kind == StepKind::send || step.kind == StepKind::recv) && !inPlace(layout, rank, step);
  };
  for (const Step &step : rank.steps)
    if (isStaged(step)) {
      Slots &slots = slotsOf(step);
      slots.bytes = std::max(slots.bytes, alignUp(step.chunk > 0 ? step.chunk : step.bytes));
      slots.chunks += chunks(step);
    }
  for (const Step &step : rank.steps) // slots follow the staged elements and relayed bytes
    for (size_t i = 0; i < step.inputs.size(); ++i)
      if (step.inputs[i].buffer == 0)
        rank.arenaBytes =
            std::max(rank.arenaBytes, alignUp(step.inputs[i].offset + operandBytes(rank.shapes[step.inputs[i].shape])));
  for (Slots &slots : all) {
    slots.base = rank.arenaBytes;
    rank.arenaBytes += std::min<int64_t>(slots.chunks, 2) * slots.bytes;
    slots.chunks = 0;
  }
  schema::ArenaUse use;
  for (uint32_t s = 0; s < rank.steps.size(); ++s) {
    Step &step = rank.steps[s];
    if (!isStaged(step))
      continue;
    Slots &slots = slotsOf(step);
    const int64_t slot = slots.chunks % 2;
    step.staging = slots.base + (step.chunk > 0 ? 0 : slot * slots.bytes);
    step.slot = static_cast<uint8_t>(step.chunk > 0 ? slot : 0);
    slots.chunks += chunks(step);
    use.take(step.staging, step.staging + step.stagingBytes(), s,
             [&](uint32_t before) { step.after.push_back(before); });
    std::sort(step.after.begin(), step.after.end());
    step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
  }
}

} // namespace

void assignRankStaging(RankSchedule &rank, const Layout &layout) {
  rank.arenaBytes = 0;
  assign(rank, layout);
  rank.arenaBytes += stagedBytes(layout, rank.buffers);
}

llvm::Error StoredRanks::assignStaging(const Layout &layout) {
  for (RankSchedule &rank : ranks_) {
    assignRankStaging(rank, layout);
    if (layout.stagingLimit > 0 && rank.arenaBytes > layout.stagingLimit)
      return llvm::make_error<StagingLimitError>(layout.stagingLimit, rank.arenaBytes,
                                                 "the arena of rank " + std::to_string(rank.rank));
  }
  return llvm::Error::success();
}

size_t StoredRanks::operands(size_t rank) const {
  size_t count = 0;
  for (const Step &step : ranks_[rank].steps)
    count += step.inputs.size() + step.outputs.size();
  return count;
}

std::vector<RankSchedule> allOf(RankSchedules &ranks) {
  std::vector<RankSchedule> all;
  all.reserve(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    RankSchedule memory;
    const RankSchedule &one = ranks.get(rank, memory);
    if (&one == &memory)
      all.push_back(std::move(memory));
    else
      all.push_back(one);
  }
  return all;
}

llvm::Error assignStaging(Module &module, std::unique_ptr<RankSchedules> &ranks) {
  return ranks->assignStaging(module.layout);
}

} // namespace reshard
