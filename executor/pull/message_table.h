// SPDX-License-Identifier: Apache-2.0
// The messages of one rank in pull mode: which it receives, which it serves, and when a range of one
// can be served.
#pragma once

#include "executor/memory/chunked_copies.h"
#include "executor/memory/packing.h"
#include "executor/pull/fleet.h"

#include <atomic>
#include <memory>
#include <unordered_map>

namespace reshard::pull {

/// How much of a version has arrived at the rank that pulls it. Only confirmed bytes count, so it never decreases
/// within a version. One thread writes, another reads.
class PullProgress {
public:
  explicit PullProgress(size_t messages) : confirmed_(messages) {}
  void reset();
  /// How many of a received message's first bytes its sender has confirmed.
  uint64_t confirmed(size_t message) const { return confirmed_[message].load(std::memory_order_acquire); }
  void confirm(size_t message, uint64_t bytes) { confirmed_[message].store(bytes, std::memory_order_release); }
  /// The number of local steps that have run.
  uint32_t locals() const { return locals_.load(std::memory_order_acquire); }
  void setLocals(uint32_t count) { locals_.store(count, std::memory_order_release); }

private:
  std::vector<std::atomic<uint64_t>> confirmed_;
  std::atomic<uint32_t> locals_{0};
};

/// A message that this rank receives.
struct ReceivedMessage {
  uint32_t message = 0;
  uint32_t sender = 0; // rank of the plan
  Packing packing;
  uint32_t localsBefore = 0; // local steps that run before its first byte is written
  bool shared = false;       // the bytes stay in the target's memory as sent, so other replicas can read them there
};

/// A message that this rank sends.
struct SentMessage {
  /// Bytes of a received message that each chunk needs.
  struct Need {
    size_t received;
    std::vector<uint64_t> bytes; // by chunk
  };
  uint32_t receiver = 0; // rank of the plan
  uint64_t chunk = 0;    // 0: one chunk
  Packing packing;
  std::vector<Need> needs;
  uint32_t localsBefore = 0;
};

/// A step that copies within the rank.
struct LocalStep {
  size_t end = 0;               // the end of its copies in MessageTable::copies()
  std::vector<size_t> received; // messages that must be complete before
};

/// A message as a server gives it to a client.
struct ServedMessage {
  const Packing *packing = nullptr;
  const SentMessage *sent = nullptr; // null: a received message, of number `received`
  size_t received = 0;
};

class MessageTable {
public:
  /// Fails if the segment has steps that pull mode does not run: on a source, other than sends of its memory.
  Status build(const Plan &plan, const Fleet &fleet, const LocalRank &rank, uint32_t worldRank);

  std::vector<ReceivedMessage> &received() { return received_; } // in the order of the plan
  const std::vector<ReceivedMessage> &received() const { return received_; }
  const std::vector<LocalStep> &locals() const { return locals_; }
  const ChunkedCopies &copies() const { return copies_; }

  enum class Serves { yes, askSender, no };
  /// Whether this rank serves a message to a client: yes; another rank of the plan must (its sender); or the client
  /// must not ask for it.
  Serves find(uint32_t message, uint32_t clientWorldRank, ServedMessage &served) const;
  /// Whether this rank has bytes [begin, end) of a served message.
  static bool ready(const ServedMessage &served, uint64_t begin, uint64_t end, const PullProgress &progress);

private:
  Status addReceive(const Plan &plan, const LocalRank &rank, uint32_t number);
  Status addSend(const LocalRank &rank, uint32_t number);
  Status addLocal(const LocalRank &rank, uint32_t number);

  Fleet fleet_;
  uint32_t worldRank_ = 0;
  std::vector<ReceivedMessage> received_;
  std::vector<SentMessage> sent_;
  std::vector<LocalStep> locals_;
  ChunkedCopies copies_;
  std::vector<size_t> index_;                                              // by step: in received_, sent_ or locals_
  std::unordered_map<uint32_t, std::pair<schema::StepKind, size_t>> byId_; // by message
};

} // namespace reshard::pull
