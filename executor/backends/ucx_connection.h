// SPDX-License-Identifier: Apache-2.0
// What the channel and the messenger of libreshard_ucx.so share: a UCX context with a worker, registered memory, and a
// connection to each peer.
//
// A process gives others its address: the protocol that it speaks, a random token, by which two workers at one port
// differ, how its memory can be read, and UCX's address of its worker. Each end sends over a connection of its own.
//
// The channel and the messenger differ where their peers do, or because of UCX 1.13:
// - The peers of a channel are those of a rendezvous, and each message has its session. Nobody waits for an answer,
//   since a peer may compute between its runs. The peers of a messenger come from anywhere, so they introduce
//   themselves, and each end draws an identity of the connection.
// - For the same reason a silent peer of a channel is not lost, and what a process sends reveals that its peer has
//   ended. A messenger polls, so that pings are answered, and a cut of the network is noticed.
// - A channel moves data from memory to memory, by active messages and UCX's rendezvous. For these, UCX first exchanges
//   numbers of the connection, and versions before 1.14 abort this process if the peer ends meanwhile. The peers of a
//   messenger may end at any time, so it sends messages with a tag, which need no such exchange, and copies.
// - So a channel that fails must destroy its worker, after which nothing writes to the caller's memory. A messenger
//   closes one connection alone.
#pragma once

#include "base/deadline.h"
#include "base/status.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <ucp/api/ucp.h>
#include <vector>

namespace reshard::ucx {

using Clock = std::chrono::steady_clock;

/// Reads the memory of another process of this host that belongs to the same user (process_vm_readv).
class PeerMemory {
public:
  /// What others need in order to read a process's memory. As bytes, it is part of a hello.
  struct Address {
    uint64_t host = 0;    // hostId()
    uint64_t process = 0; // process id
    uint64_t token = 0;   // a random number in the process's memory, since process ids are used again
    uint64_t at = 0;      // the address of that number
  };
  static Address own();

  /// Whether this process can read the memory of that one.
  bool open(const Address &address);
  bool isOpen() const { return process_ > 0; }
  /// Whether the process still exists. A process that is stopped does.
  bool isAlive() const;
  /// Copies bytes from an address of the other process; false if it has ended or does not have that memory.
  bool read(std::byte *to, uint64_t from, uint64_t bytes) const;
  /// Copies the next part of `bytes`, so that the caller can do other work between parts. `copied`: so far.
  bool readPart(std::byte *to, uint64_t from, uint64_t bytes, uint64_t &copied) const;

private:
  int32_t process_ = 0;
  Address address_;
};

constexpr size_t kProtocolBytes = 16;
/// Bytes of an address before UCX's part.
constexpr size_t kGreetingBytes = kProtocolBytes + 2 * sizeof(uint64_t) + sizeof(PeerMemory::Address);
/// The most messages that wait to be sent over a connection; the caller keeps to it.
constexpr size_t kMaxPosts = 1024;

/// How an operation of UCX has ended, and frees its request: then null. No value while UCX works on it. `request`: null
/// or an error if the operation ended at once.
std::optional<ucs_status_t> resultOf(void *&request);

/// A message that UCX sends or receives. UCX may access the bytes until the request is complete.
struct Post {
  std::string bytes;
  void *request = nullptr;
};

/// This end of a connection to the worker of another process.
struct Connection {
  std::string address;           // the peer's address
  uint64_t token = 0;            // the token in that address
  PeerMemory memory;             // the peer's, if this process can read it
  ucp_ep_h endpoint = nullptr;   // null: it could not be made, or is closed
  ucs_status_t failure = UCS_OK; // the first error of UCX
  std::list<Post> posts;         // posts that UCX sends
  void *flush = nullptr;         // the request that ends when all is sent; then the endpoint is closed
  bool ends = false;             // disconnect() was called
  Clock::time_point pinged = Clock::now();

  void fail(ucs_status_t status) { failure = failure == UCS_OK ? status : failure; }
  bool isFull() const { return posts.size() >= kMaxPosts; }
  /// Whether the caller must send a ping: the last one is older than the interval, and the connection is not full.
  bool pingIsDue(Clock::duration interval);
};

struct Region {
  std::byte *begin, *end;
  ucp_mem_h handle;
  bool host; // not the memory of a GPU
};

/// A context and its worker, with its connections and the memory that is registered in it.
class Worker {
public:
  Worker() = default;
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  ~Worker() { close(); }

  /// `protocol`: its name and version, which begins an address. `peers`: how many connections are expected.
  /// `features`: UCP_FEATURE_…; `received` is called with `argument` for each active message.
  Status open(std::string_view protocol, size_t peers, uint64_t features, ucp_am_recv_callback_t received,
              void *argument);
  /// Frees all, and closes the connections at once. Operations that have not ended are over: nothing accesses their
  /// memory later.
  void close();
  bool isOpen() const { return worker_ != nullptr; }
  operator ucp_worker_h() const { return worker_; }
  /// By which others connect.
  const std::string &address() const { return address_; }
  uint64_t token() const { return token_; }

  /// Begins a connection; null if `address` is damaged, or of another protocol. An error of UCX is its `failure`.
  Connection *connect(std::string_view address);
  /// Sends the bytes of `head` and `rest`: an active message, whose header are the first `header` bytes; or, if that is
  /// 0, a message whose tag is the peer's token. Does nothing on a connection that has failed. Short messages allocate
  /// nothing, unless very many wait.
  void post(Connection &connection, std::string_view head, std::string_view rest = {}, size_t header = 0);
  /// Closes a connection: at once if it is broken, or if UCX holds no unsent data of it (`nothingWaits`); else
  /// progress() closes it when the peer has received all. A peer that makes no progress keeps the connection open. The
  /// caller uses it no more.
  void disconnect(Connection &connection, bool nothingWaits = false);
  /// Lets UCX send, receive and call back; then closes connections.
  void progress();
  /// Makes progress until all messages are sent and no connection waits to be closed.
  void finish(const Deadline &deadline);

  Status registerMemory(std::byte *data, uint64_t bytes);
  /// Unregisters each region for which `useless` returns true. No operation is in flight on its memory.
  void unregisterIf(const std::function<bool(const Region &)> &useless);
  /// Registered memory with these bytes; null if there is none.
  const Region *regionOf(const std::byte *data, uint64_t bytes) const;

private:
  /// Takes a post that is complete from its connection, and keeps a short one to be used again.
  void release(Connection &connection, std::list<Post>::iterator post);
  /// Frees what UCX has sent, and closes the connection if it ends. Returns whether nothing is left to do for it; a
  /// connection that has ended is then gone.
  bool isIdle(Connection &connection);
  /// Closes an endpoint at once. If not all is sent, UCX must make no progress afterwards, because it may crash. When
  /// the peer closes, too, UCX can find two events of the socket at one time: the end of the peer's connection, and
  /// space for unsent data. It handles the end first, which frees the connection, and then uses the freed connection
  /// for the space (uct_tcp_iface_handle_events, UCX 1.13 to 1.22).
  static void closeAtOnce(Connection &connection);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string protocol_; // kProtocolBytes bytes
  uint64_t token_ = 0;
  std::string address_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Connection *> busy_; // connections that send or end
  std::list<Post> spare_;          // short posts for later messages
  std::vector<Region> regions_;    // sorted, without overlaps
};

} // namespace reshard::ucx
