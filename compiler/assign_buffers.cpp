// assign-buffers: a fixed place in the rank's arena for every message. A message that is one contiguous piece of a param moves in
// place; the others are packed side by side, sends and receives alike, and every round starts again at the front.

#include "compiler/pass.h"
#include "compiler/staging.h"

#include <algorithm>

namespace reshard {

using namespace ir;

std::string assignBuffers(Module &module) {
  for (RankSchedule &rank : module.schedule.ranks) {
    int64_t next = 0;
    uint32_t round = 0;
    for (Step &step : rank.steps) {
      if (step.kind != StepKind::send && step.kind != StepKind::recv)
        continue;
      if (step.round != round) {
        round = step.round;
        next = 0;
      }
      const std::vector<Operand> &operands = step.kind == StepKind::send ? step.inputs : step.outputs;
      if (operands.size() == 1 && rank.shapes[operands[0].shape].loops.empty())
        continue;
      step.staging = next;
      next += staged(step.bytes);
      rank.arenaBytes = std::max(rank.arenaBytes, next);
    }
    if (module.layout.stagingLimit > 0 && rank.arenaBytes > module.layout.stagingLimit)
      return "rank " + std::to_string(rank.rank) + " needs " + std::to_string(rank.arenaBytes) +
             " bytes of staging, more than the limit of " + std::to_string(module.layout.stagingLimit);
  }
  return {};
}

} // namespace reshard
