// SPDX-License-Identifier: Apache-2.0
// The steps of a rank whose messages are moved by processes: how each moves its bytes, and how far a run is.
#pragma once

#include "executor/memory/chunked_copies.h"
#include "executor/memory/chunks.h"
#include "executor/memory/packing.h"
#include "executor/transports/local_peers.h"
#include "executor/transports/transport.h"

#include <array>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

/// How a step moves its bytes: receive or send, over the channel or through the slots of the sender; copy out of a
/// local peer's bound memory; publish to a local peer, which copies; copy within the rank.
enum Method { kReceive, kSend, kCopyFromPeer, kPublish, kLocal };

struct MessageState {
  const schema::Step *step = nullptr;
  Packing packing;
  uint64_t chunks = 1;
  uint64_t begun = 0, done = 0;  // chunks, in this run
  std::vector<uint32_t> sharing; // for send and receive: earlier messages of that method that used its slots
  /// (step, how many chunks of it must be done before each chunk of this message)
  std::vector<std::pair<uint32_t, std::vector<uint64_t>>> dependencies;
  Progress *progress = nullptr;         // in the sender's block; null if the message uses the channel
  uint64_t copied = 0;                  // bytes, in this run: of kCopyFromPeer; through slots, those packed or unpacked
  const std::byte *peerSlots = nullptr; // for a receive through slots
  uint8_t peerSlot = 0;                 // the one of chunk 0

  uint64_t end(uint64_t chunk) const { return chunk * step->chunk() + chunkBytes(*step, chunk); }
};

/// ": message 3 of round 1 to rank 5, chunk 0 of 4", for error texts.
std::string messageText(bool send, const MessageState &message, uint64_t chunk);

struct RunSteps {
  std::array<std::vector<MessageState>, 4> messages; // by method, in the order of the plan
  std::array<size_t, 4> first{};                     // by method: the first unfinished message
  ChunkedCopies copies;                              // the local steps, in order
  size_t copied = 0;                                 // chunks of `copies` that are done
  std::vector<MessageState> locals;                  // local steps, for their dependencies
  std::vector<size_t> localEnds;                     // by local step: the end of its copies
  size_t local = 0;                                  // the first unfinished local step
  std::vector<std::pair<Method, size_t>> where;      // by step: index in `messages`, or end in `copies`
  uint64_t runs = 0;                                 // completed runs
  bool stream = false;                               // with streaming stores
  BytesBy by;

  uint64_t bytes() const { return by.local + by.sharedMemory + by.messages; }
  void beginRun();
  bool finished() const;
  /// The messages of a method to look at: at most 8, from the first unfinished one on.
  std::span<MessageState> next(Method method);
  void skipFinished(Method method);
  /// Whether the next chunk of a message has all the bytes that it depends on.
  bool dependenciesDone(const MessageState &message) const;

private:
  /// The number of chunks of a step that are done.
  uint64_t done(uint32_t step) const;
};

/// Makes the RunSteps of a rank. Each receiver decides which messages it copies out of the memory of a local peer;
/// their senders know when all processes have added their receives.
class RunStepsBuilder {
public:
  /// `addresses`: of the local peers. `shortcut`: as for makeMessageTransport().
  RunStepsBuilder(const Plan &plan, const LocalRank &rank, LocalPeers &peers,
                  const std::map<uint32_t, PeerAddress> &addresses, bool shortcut, RunSteps &steps);
  /// Adds all steps but the sends.
  Status addReceives() { return addSteps(false); }
  Status addSends() { return addSteps(true); }
  /// Finds what each step waits for, when all are added.
  void link();

private:
  /// The memory of a send of a local peer.
  struct SenderMemory {
    bool mapped = true;   // all of it is mapped here, and the receiver copies it
    bool relayed = false; // the sender relays bytes from the head of its arena, which is never mapped
  };
  Status addSteps(bool sends);
  Status addStep(uint32_t number);
  Status addLocal(const schema::Step &step, uint32_t number);
  Method placeSend(MessageState &message, uint32_t number);
  Result<Method> placeReceive(MessageState &message);
  Status addOperands(MessageState &message, uint32_t number, bool sends);
  /// Pairs a receive with its send, to copy out of the sender's memory, or else out of its slots.
  Result<SenderMemory> pairWithSender(const LocalRank &other, MessageState &message);
  void linkStep(Method method, MessageState &message) const;
  /// Adds the earlier messages over the channel whose slots `message` uses. Steps that receivers copy do not use
  /// theirs: their own predecessors count instead. Each step is visited once, since their paths may join again.
  void addSharing(Method method, uint32_t earlier, MessageState &message) const;

  const Plan &plan_;
  const LocalRank &rank_;
  LocalPeers &peers_;
  const std::map<uint32_t, PeerAddress> &addresses_;
  const bool shortcut_;
  RunSteps &steps_;
};

} // namespace reshard
