// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/message_sides.h"

#include <algorithm>
#include <tuple>

namespace reshard {

ir::Step MessageSide::step(int32_t rank, const Message &of, int64_t world) const {
  ir::Step step;
  step.kind = receive ? ir::StepKind::recv : ir::StepKind::send;
  step.round = round;
  step.peer = static_cast<int32_t>((receive ? rank + world - distance : rank + int64_t{distance}) % world);
  step.message = message;
  step.bytes = of.bytes;
  step.chunk = of.chunk;
  return step;
}

std::vector<std::vector<MessageSide>> messageSides(llvm::ArrayRef<Message> messages, const Periods *periods,
                                                   uint32_t periodRounds, int64_t world) {
  std::vector<std::vector<MessageSide>> sides(static_cast<size_t>(world));
  uint32_t number = 0;
  for (uint32_t period = 0; period < (periods ? periods->count() : 1); ++period)
    for (const Message &message : messages) {
      const int32_t to = periods ? periods->to(message, period) : message.to;
      const auto distance = static_cast<uint32_t>((to - message.from + world) % world);
      const uint32_t round = message.round + period * periodRounds;
      sides[message.from].push_back({round, false, distance, number});
      sides[to].push_back({round, true, distance, number});
      ++number;
    }
  for (std::vector<MessageSide> &ofRank : sides)
    std::sort(ofRank.begin(), ofRank.end(), [](const MessageSide &a, const MessageSide &b) {
      return std::tie(a.round, a.receive, a.distance, a.message) < std::tie(b.round, b.receive, b.distance, b.message);
    });
  return sides;
}

} // namespace reshard
