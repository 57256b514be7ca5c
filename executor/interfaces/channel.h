// SPDX-License-Identifier: Apache-2.0
// The interface of a backend of the message transport: nonblocking point-to-point sends and receives of bytes between
// processes. A backend is a module, libreshard_NAME.so (executor/interfaces/module.cpp).
#pragma once

#include "base/status.h"
#include "executor/rendezvous/rendezvous.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reshard {

struct MemoryRange {
  const std::byte *begin, *end;
};

/// The channel of one process. The caller numbers requests, [0, requests); a completed request may be used again.
class Channel {
public:
  virtual ~Channel() = default;

  /// The rank of this process, and the number of processes: both as in the plan.
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// The greatest allowed tag, at least 32767.
  virtual uint32_t maxTag() const = 0;
  /// Allocates that many requests. Must be called before the first one; again only while none is in flight.
  virtual void reserve(size_t requests) = 0;
  /// Memory that messages will be sent from or received into. It stays valid until the channel is closed or abandoned.
  /// A backend may register it with the network once; messages in other memory are allowed and may be slower. It
  /// replaces earlier registrations that overlap it. No message is in flight.
  virtual Status registerMemory(std::byte *, uint64_t) { return {}; }
  /// Drops all registrations of memory outside these ranges. No message is in flight.
  virtual void keepMemory(const std::vector<MemoryRange> &) {}

  /// Leaves the processes that the channel has connected, and joins the processes of another rendezvous, which outlives
  /// the channel: rank and size are then as there. Registered memory and the connections to processes that are in both
  /// stay. If it fails, the channel is as before. After abandon() it opens the channel anew. No message is in flight.
  virtual Status rejoin(Rendezvous &, const Deadline &) {
    return invalid("this transport cannot join other processes");
  }

  /// Connects to a peer, if it is not connected yet. A message to another peer connects to it first, which may take
  /// long.
  virtual Status connect(uint32_t) { return {}; }

  /// Starts a send or a receive of at most kMaxChannelBytes bytes, with a tag of at most maxTag(). Messages of one pair
  /// of ranks and one tag arrive in order.
  virtual Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) = 0;
  virtual Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) = 0;
  /// Whether a request is complete; also makes progress on the others. Fails if its peer is lost: a backend without a
  /// launcher that ends all processes detects within about a second that the process has ended.
  virtual Result<bool> test(size_t request) = 0;
  /// Tells a connected peer that this process begins its run of a number, from 1 on.
  virtual void tellRun(uint32_t, uint64_t) {}
  /// The last run that a peer has reported; no value: the backend reports none.
  virtual std::optional<uint64_t> lastRunOf(uint32_t) const { return {}; }
  /// For a caller that waits for a peer and has no request in flight: makes progress, and fails if the peer is lost, as
  /// test() does.
  virtual Status check(uint32_t) { return {}; }
  /// A run failed and peers may be gone: from here on the channel waits for nothing, not even in its destructor.
  /// Returns whether the memory of messages is the caller's again: no pending receive writes to it later. MPI cannot
  /// withdraw receives, so it returns false, and the memory may be written until the process ends.
  /// A backend may tell its peers the `reason`, so that their errors name the rank that failed first; before the first
  /// run also processes that it has not connected to, which may wait for this process.
  virtual bool abandon(const Status &reason) = 0;
};

constexpr uint64_t kMaxChannelBytes = uint64_t{1} << 30;

struct ChannelOptions {
  /// The limit of each wait for another process after opening, and of closing; 0: no limit.
  double seconds = 0;
  /// By which all processes must have joined; no value: `seconds` from now. Its interrupt, which outlives the channel,
  /// ends the later waits, too.
  Deadline deadline = {};
  /// Finds the other processes. Null for a backend whose launcher does (mpi). It outlives the channel.
  Rendezvous *rendezvous = nullptr;
};

constexpr uint32_t kChannelVersion = 8;
/// The function that a module exports as `reshard_open_channel`, with `reshard_open_channel_version`. Returns a
/// channel, or null and sets `error`, of kind timedOut if not all processes joined within the limit.
using OpenChannel = Channel *(*)(const ChannelOptions &options, Status &error);

/// Loads the module of a backend and opens its channel.
Result<std::unique_ptr<Channel>> openChannel(const std::string &name, const ChannelOptions &options);

} // namespace reshard
