// SPDX-License-Identifier: Apache-2.0
// The messages of each rank, in the order of its steps.
#pragma once

#include "compiler/schedule/periods.h"
#include "compiler/schedule/rounds.h"

#include <vector>

namespace reshard {

/// One end of a message, in the list of its rank. It has all that orders the list: the messages of a rank lie far apart
/// in memory, and reading each of them would be much of the compiler's time.
struct MessageSide {
  uint32_t round;
  bool receive;
  uint32_t distance; // from the sender up to the receiver, modulo the world
  uint32_t message;  // number

  /// The send or receive of `rank`, without operands. `of`: the message, or the one that it repeats.
  ir::Step step(int32_t rank, const Message &of, int64_t world) const;
};

/// The ends of the messages, by rank. In a round, sends precede receives; sends are ordered by distance to the next
/// higher ranks, receives by distance to the next lower ranks. `periods`: repeat the messages every `periodRounds`
/// rounds, and number them period after period; null: nothing repeats them.
std::vector<std::vector<MessageSide>> messageSides(llvm::ArrayRef<Message> messages, const Periods *periods,
                                                   uint32_t periodRounds, int64_t world);

} // namespace reshard
