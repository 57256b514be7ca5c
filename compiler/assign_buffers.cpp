// assign-buffers: a fixed place in the rank's arena for every message. A message that is one contiguous piece of a
// param moves in place. The others of a round are packed side by side; sends and receives have two slots each, which a
// rank's rounds take in turn, so that one round is packed or unpacked while the next is under way. A step that takes
// over bytes of the arena waits for the steps that had them last.

#include "compiler/pass.h"
#include "compiler/staging.h"
#include "schema/arena.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

bool inPlace(const RankSchedule &rank, const Step &step) {
  const std::vector<Operand> &operands = step.kind == StepKind::send ? step.inputs : step.outputs;
  return operands.size() == 1 && rank.shapes[operands[0].shape].loops.empty();
}

/// Rounds of one direction, in two slots.
struct Direction {
  int64_t sizes[2] = {0, 0};
  int slot = 1;
  int64_t round = -1, next = 0;

  /// The place of `bytes` bytes in the slot of a round.
  int64_t take(int64_t of, int64_t bytes) {
    if (of != round) {
      round = of;
      slot = 1 - slot;
      next = 0;
    }
    const int64_t place = next;
    next += staged(bytes);
    sizes[slot] = std::max(sizes[slot], next);
    return place;
  }
};

void assign(RankSchedule &rank) {
  Direction directions[2];
  std::vector<int> slotOf(rank.steps.size(), -1);
  for (size_t s = 0; s < rank.steps.size(); ++s) {
    Step &step = rank.steps[s];
    if ((step.kind != StepKind::send && step.kind != StepKind::recv) || inPlace(rank, step))
      continue;
    const int receives = step.kind == StepKind::recv;
    step.staging = directions[receives].take(step.round, step.bytes);
    slotOf[s] = 2 * receives + directions[receives].slot;
  }
  int64_t starts[4], total = 0;
  for (int slot = 0; slot < 4; ++slot) {
    starts[slot] = total;
    total += directions[slot / 2].sizes[slot % 2];
  }
  rank.arenaBytes = total;
  schema::ArenaUse use;
  for (uint32_t s = 0; s < rank.steps.size(); ++s) {
    if (slotOf[s] < 0)
      continue;
    Step &step = rank.steps[s];
    step.staging += starts[slotOf[s]];
    for (uint32_t before : use.take(step.staging, step.staging + step.bytes, s))
      step.after.push_back(before);
    std::sort(step.after.begin(), step.after.end());
    step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
  }
}

} // namespace

std::string assignBuffers(Module &module) {
  for (RankSchedule &rank : module.schedule.ranks) {
    assign(rank);
    if (module.layout.stagingLimit > 0 && rank.arenaBytes > module.layout.stagingLimit)
      return "rank " + std::to_string(rank.rank) + " needs " + std::to_string(rank.arenaBytes) +
             " bytes of staging, more than the limit of " + std::to_string(module.layout.stagingLimit);
  }
  return {};
}

} // namespace reshard
