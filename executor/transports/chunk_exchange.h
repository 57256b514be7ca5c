// SPDX-License-Identifier: Apache-2.0
// The chunks of a rank's messages that are in flight: over the channel, and through the slots of local peers.
#pragma once

#include "executor/interfaces/channel.h"
#include "executor/transports/run_steps.h"

#include <array>

namespace reshard {

/// The maximum of chunks in flight in one direction: the exchange uses requests [0, 2 * kInFlight) of the channel.
constexpr size_t kInFlight = 16;

/// The slots of a rank's messages: its arena without the head, which LocalRank has.
struct SlotMemory {
  std::byte *memory = nullptr;
  uint64_t headBytes = 0, bytes = 0;
};

/// Progresses the messages of methods kSend and kReceive.
class ChunkExchange {
public:
  ChunkExchange(RunSteps &steps, Channel &channel, const SlotMemory &slots)
      : steps_(steps), channel_(channel), slots_(slots) {}

  /// Progresses the chunks in flight and starts others. Sets `any` if something was done.
  Status exchange(bool &any);
  /// Whether a chunk over the channel is in flight, so that the channel must be polled.
  bool channelWaits() const { return channelWaits_; }
  /// Fails if a local peer is lost whose chunks through slots are in flight.
  Status checkPeers() const;

private:
  /// A chunk that is being sent or received.
  struct ChunkInFlight {
    MessageState *message = nullptr; // null: free
    uint64_t chunk = 0;
    std::byte *begin = nullptr, *end = nullptr; // its slot in the arena; null if in place
  };
  /// Whether the next chunk of a message may start.
  bool ready(Method send, const MessageState &message) const;
  /// The memory of the next chunk: its slot of the arena, and then `end` is set; or bound memory.
  std::byte *nextChunk(const MessageState &message, std::byte *&end) const;
  /// Starts the next chunk, unless its slot is in use or at most `reserved` places in flight are free. Returns whether
  /// it was started.
  Result<bool> begin(Method send, MessageState &message, size_t reserved);
  /// Progresses a chunk in flight. Returns whether it is complete.
  Result<bool> advance(Method send, size_t number, bool &any);
  /// Packs the next part of a chunk into its slot, if its place there is free. Returns whether the chunk is complete:
  /// the receiver has taken it.
  bool packPart(const ChunkInFlight &flight, bool &any) const;
  /// Unpacks the next part of a chunk out of the sender's slot, if it has been packed. Returns whether the chunk is
  /// complete.
  bool unpackPart(const ChunkInFlight &flight, bool &any) const;

  RunSteps &steps_;
  Channel &channel_;
  const SlotMemory &slots_;
  std::array<std::array<ChunkInFlight, kInFlight>, 2> inFlight_; // by method
  bool channelWaits_ = false;
};

} // namespace reshard
