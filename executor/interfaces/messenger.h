// SPDX-License-Identifier: Apache-2.0
// The interface of a backend of pull mode (executor/pull/): frames between processes that join and end at any time.
// There is no fixed number of peers, and no process waits for a peer to join. A backend is a module, libreshard_NAME.so
// (executor/interfaces/module.cpp).
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace reshard {

/// A short message. The meaning of the words is the caller's.
struct Frame {
  std::array<uint64_t, 8> words{};
};

/// What has happened at a messenger.
struct MessengerEvent {
  enum Kind {
    kArrived,  // a frame of a peer, with its text or the announcement of its data
    kSent,     // the data of sendData() may be changed or freed
    kReceived, // the data of receive() have arrived
    kLost,     // the connection has ended; no other event of this peer follows, and its number is free
  };
  Kind kind = kArrived;
  uint32_t peer = 0;
  Frame frame;            // for kArrived
  std::string text;       // for kArrived; may be empty
  uint64_t dataBytes = 0; // for kArrived: the length of data that wait for receive(); 0: none
  uint64_t data = 0;      // for kArrived: the number of the data, for receive()
  uint64_t token = 0;     // for kSent and kReceived: the caller's
  bool ok = true;         // for kSent and kReceived: false if the transfer was ended by a failure or a disconnect
  Status reason;          // for kLost
};

/// One end of connections to other processes. One thread uses it at a time. It must poll: a peer that cannot read this
/// process's memory ends the connection after kUnresponsiveSeconds.
class Messenger {
public:
  virtual ~Messenger() = default;

  /// The address by which another process connects to this one: at most 4096 bytes, the same until it is closed.
  virtual const std::string &address() const = 0;
  /// Connects to a process and returns its number here. Does not wait: if the process does not exist, or is not the one
  /// that made this address, an event kLost follows. Fails if the address is malformed.
  virtual Result<uint32_t> connect(std::string_view address) = 0;
  /// Ends a connection. Transfers of its data are over when it returns: nothing reads or writes their memory later.
  /// Their events, and events that poll() has not returned yet, are dropped. The number is free. The peer may not get
  /// the last frames that were sent.
  virtual void disconnect(uint32_t peer) = 0;
  /// Sends a frame with at most kMaxFrameText bytes of text, which are copied. Frames to one peer arrive in order.
  /// Fails if the connection is lost, or if kMaxFrames frames are not sent yet because the peer does not receive them.
  virtual Status send(uint32_t peer, const Frame &frame, std::string_view text = {}) = 0;
  /// Sends a frame whose data follow when the peer calls receive(). The data must not change until kSent with `token`.
  virtual Status sendData(uint32_t peer, const Frame &frame, const std::byte *data, uint64_t bytes, uint64_t token) = 0;
  /// Receives the data of an arrival into memory that must not be used until kReceived with `token`.
  virtual Status receive(uint32_t peer, uint64_t data, std::byte *to, uint64_t token) = 0;
  /// Makes progress. Returns the next event, if there is one.
  virtual std::optional<MessengerEvent> poll() = 0;
  /// Whether this process can read the peer's memory (one host, same user). Known from the first frame of the peer on.
  virtual bool readsMemory(uint32_t peer) const = 0;
  /// Copies bytes of the peer's memory; false if the process has ended or does not have that memory.
  virtual bool readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) = 0;
  /// How many messages were dropped so far, since they did not belong to a connection or were malformed.
  virtual uint64_t dropped() const { return 0; }
};

constexpr uint64_t kMaxFrameText = 4096;
constexpr size_t kMaxFrames = 1024;
/// The connection to a peer of another host is lost when the peer has sent nothing for this time; a process that is
/// stopped for less time is not lost. The limit does not apply to a process of this host that has answered once, since
/// its end is detected in its memory.
constexpr double kUnresponsiveSeconds = 10;

constexpr uint32_t kMessengerVersion = 1;
/// The function that a module exports as `reshard_open_messenger`, with `reshard_open_messenger_version`. Returns a
/// messenger, or null and sets `error`.
using OpenMessenger = Messenger *(*)(Status &error);

/// Loads the module of a backend and opens a messenger.
Result<std::unique_ptr<Messenger>> openMessenger(const std::string &name);

} // namespace reshard
