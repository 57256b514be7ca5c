// SPDX-License-Identifier: Apache-2.0
// The messages of transport `ucx` that have arrived and wait for their receive. UCX may pass them on in another order
// than they were sent. This part does not call UCX.

#pragma once

#include "executor/interfaces/channel.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace reshard::ucx {

/// Longer messages are announced.
constexpr uint64_t kEagerBytes = 2048;
/// The most messages with data that one peer has sent and this process has not received. Beyond it, short messages are
/// sent by rendezvous too, so that a fast sender does not fill the memory of a slow receiver.
constexpr uint64_t kWindow = 16;
/// The most messages of one peer that wait for their receive: kWindow, and one for each request of the peer. More are
/// an error.
constexpr size_t kMaxArrivals = size_t{1} << 16;

/// What a message is.
enum Id : unsigned {
  kMessage, // with its data, or by UCX's rendezvous
  kReadMe,  // a message that the receiver reads out of the sender's memory
  kRead,    // it has read message `number`
  kReader,  // its sender can read the receiver's memory
  kCredit,  // its sender has received `number` messages with data, ever
  kProbe,   // its sender waits for the receiver; if the connection is lost, sending reveals it
  kLoss,    // its sender fails because of rank `number`; with the reason as text
  kRun,     // its sender begins run `number`
};

/// The header of each message.
struct Header {
  uint64_t session = 0;
  uint64_t number = 0; // counts the messages from `rank` to the receiver, from 0 on
  uint64_t bytes = 0;
  uint64_t address = 0; // for kReadMe
  uint32_t rank = 0, tag = 0;
  Id id = kMessage;
  uint32_t unused = 0;
};

/// A message that waits for its receive: its bytes have arrived, or been announced.
struct Arrival {
  Header header;
  size_t place = 0;           // where bytes that have arrived are in the inbox
  void *descriptor = nullptr; // the data's handle in UCX's rendezvous
  bool eager() const { return header.id == kMessage && !descriptor; }
};

/// The messages of one peer that have arrived, and the receives that wait for one. A receive gets the first message of
/// its tag, in the order in which the peer has sent them.
class ArrivalQueue {
public:
  struct Match {
    size_t request;
    Arrival arrival;
  };
  /// Allocates what this many requests need.
  void reserve(size_t requests);
  /// The number of messages that have arrived, up to the first gap.
  uint64_t admitted() const { return admitted_; }
  /// Stores a message for match(). False if it breaks the protocol: `bytes` at `data` have come with it.
  bool add(Arrival arrival, const void *data, size_t bytes);
  /// The next message for which a receive waits.
  std::optional<Match> match();
  /// The message that a new receive gets; null if it has not arrived.
  const Arrival *find(uint32_t tag) const;
  void remove(const Arrival *found) { arrivals_.erase(arrivals_.begin() + (found - arrivals_.data())); }
  void wait(size_t request, uint32_t tag) { receives_.push_back({request, tag}); }
  const std::byte *bytesOf(const Arrival &arrival) const { return inbox_->memory[arrival.place]; }
  /// The bytes of a message are copied.
  void free(const Arrival &arrival) { inbox_->used[arrival.place] = false; }
  /// Forgets all messages and returns them, so that the caller can free their descriptors.
  std::vector<Arrival> takeAll() { return std::exchange(arrivals_, {}); }

private:
  struct Receive {
    size_t request;
    uint32_t tag;
  };
  struct Inbox {
    std::byte memory[kWindow][kEagerBytes];
    bool used[kWindow] = {};
  };
  std::vector<Arrival> arrivals_; // messages below admitted_ are in front, in the order of their numbers
  std::vector<Receive> receives_; // without a message, in the order of the calls
  std::unique_ptr<Inbox> inbox_;  // bytes of arrivals; made for the first one
  uint64_t admitted_ = 0;
};

} // namespace reshard::ucx
