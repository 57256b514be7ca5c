// SPDX-License-Identifier: Apache-2.0
// The second phase of the pass schedule: flows become messages in rounds.
#pragma once

#include "compiler/schedule/flows.h"
#include "compiler/schedule/rounds.h"

#include "llvm/ADT/STLFunctionalExtras.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace reshard {

/// The largest number of chunks of a plan. A small staging limit makes many.
constexpr int64_t kMaxPlanChunks = 1 << 24;

/// The chunk sizes of each link tier: small enough for the last rounds of its pairs and for its routes, large enough to
/// keep a port busy with two slots, and not larger than the staging limit allows; and the rounds of a chunk between
/// nodes. The arena holds two chunks
/// in each direction: one is packed while the other is sent, or unpacked while the other is received. `staged`: the
/// largest number of bytes that a rank's arena holds besides messages. `copies`: the number of ranks to which the
/// sender of a flow sends it; `flows` has one of them. Returns an error if the plan would have too many chunks, a
/// StagingLimitError if a higher limit avoids that.
llvm::Expected<RoundLimits> roundLimits(const std::vector<Flow> &flows, const ir::Layout &layout, int64_t staged,
                                        int64_t copies = 1);

/// Rounds of a job whose target has copies that receive the same bytes from the same sources (ir/copies.h).
///
/// Assigns the flows to the first of `copies` copies of the target to rounds of one period, and repeats the period for
/// each copy. In the period, each flow arrives in one of the copies; in the next period in the copy after that, and so
/// on. So every copy has received every flow once after as many periods as there are copies, and the time of the
/// compiler does not grow with their number.
///
/// The flows of each target are distributed over the copies so that each has about as many chunks in a period.
///
/// A flow has one hop. `inCopy`: the rank of a copy that has the part of the target of a rank of the first copy; it
/// must outlive this object.
class Periods {
public:
  using InCopy = llvm::function_ref<int32_t(int32_t rank, uint32_t copy)>;
  Periods(llvm::ArrayRef<Flow> flows, uint32_t copies, InCopy inCopy)
      : flows_(flows), copies_(copies), inCopy_(inCopy), copyOf_(flows.size()) {}

  /// The messages of the first period, in rounds of assignRounds(). nullopt if all periods would take 1 / 64 more
  /// rounds than the busiest port needs: a target with few flows of different sizes cannot be divided evenly.
  std::optional<std::vector<Message>> first(const ir::Topology &topology, const RoundLimits &limits, const Cuts &cuts);
  uint32_t count() const { return copies_; }
  /// The rank that receives a message of the first period when a later period repeats it, as many rounds after the
  /// beginning of that period.
  int32_t to(const Message &message, uint32_t period) const {
    const uint32_t flow = message.grants[0].flow; // the others have the same ends
    return inCopy_(flows_[flow].hops[0].to, (copyOf_[flow] + period) % copies_);
  }

private:
  void distribute(int64_t chunkBytes);

  llvm::ArrayRef<Flow> flows_;
  uint32_t copies_;
  InCopy inCopy_;
  std::vector<uint32_t> copyOf_; // by flow: where it arrives in the first period
};

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

/// The result of the second phase.
struct MessagePlan {
  std::vector<Message> messages; // the messages of the first period
  uint32_t periods = 1;          // messages are numbered period after period
  uint32_t rounds = 0;           // the rounds of all periods
  std::map<EpochPhase, uint32_t> lastRound;
  std::vector<std::vector<MessageSide>> sides;                                  // by rank
  std::vector<std::vector<std::vector<std::pair<int64_t, uint32_t>>>> arrivals; // by flow and hop: (end, message);
                                                                                // empty: no flow is forwarded

  /// The number of messages of all periods.
  size_t count() const { return messages.size() * periods; }
  /// The message of the first period that a message repeats.
  const Message &of(uint32_t number) const { return messages[number % messages.size()]; }
};

/// Assigns rounds and messages, for each epoch and phase after the one before it, so that the rounds of earlier epochs
/// (--keep) do not change; then cuts the descriptors of `flows` where messages end. If rounds cannot repeat for the
/// copies of a target, adds the flows to these to `flows`. Returns an error if there are too many messages or chunks, a
/// StagingLimitError if a higher limit avoids that.
llvm::Expected<MessagePlan> planMessages(Flows &flows);

} // namespace reshard
