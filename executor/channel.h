// What a backend gives to the message transport: nonblocking bytes from process to process. A backend is a module,
// libreshard_NAME.so, found beside the program or on the library path and loaded when it is asked for: so that one
// executor runs on machines with and without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace reshard {

/// One process's end. Requests are numbered by the caller, [0, requests); one that was waited for may be used again.
class Channel {
public:
  virtual ~Channel() = default;

  /// This process, and how many there are: the ranks of the plan.
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  /// The greatest tag of its messages, at least 32767.
  virtual uint32_t maxTag() const = 0;
  /// Room for so many requests; before any, and again while none is on its way.
  virtual void reserve(size_t requests) = 0;

  /// Begins to send, or to receive, bytes under a tag of at most maxTag(). Those of one pair and tag arrive in order.
  /// At most kMaxWireBytes.
  virtual std::string send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) = 0;
  virtual std::string receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) = 0;
  /// Whether a request is done; makes progress.
  virtual std::string test(size_t request, bool &done) = 0;
  /// The run failed: peers may be gone. Nothing will be waited for any more, not even at the end. What was to be
  /// received may still be written, as long as the process lives: MPI cannot take back what has begun.
  virtual void abandon() = 0;
};

constexpr uint64_t kMaxChannelBytes = uint64_t{1} << 30;

constexpr uint32_t kChannelVersion = 2;
/// What a module exports as `reshard_open_channel`, beside `reshard_open_channel_version`: a wire, or null and an error
/// text of at most `room` bytes; `*timed_out` is not 0 where it says that so many seconds (0: no limit) have passed
/// without all processes having come. The same limit holds when the wire is closed.
using OpenChannel = Channel *(*)(double seconds, char *error, size_t room, int *timed_out);

/// Loads the module of a backend and opens its wire. An error text says what is missing, or who; empty on success.
std::string openChannel(const std::string &name, double seconds, std::unique_ptr<Channel> &channel, bool &timedOut);

} // namespace reshard
