// SPDX-License-Identifier: Apache-2.0
// The channel of libreshard_ucx.so, over UCP, the protocol layer of UCX 1.13 or a later 1.x. Each channel has a context
// and a worker of its own, so that a process can close one channel and open another, also after a failure.
//
// All is sent as active messages; the header has the session of the rendezvous and the sender's number of the message.
// A message of at most kEagerBytes carries its data. A longer one is sent by UCX's rendezvous: the sender announces its
// memory, and when the receive is posted, UCX moves the bytes from memory to memory, without a copy by either process
// where the network can (over TCP, UCX 1.13 must copy: ucx_worker.cpp).
// Inside a host the receiver instead reads a longer one out of the sender's registered memory (peer_memory.h), since
// UCX 1.13 would use TCP: its shared memory does not detect that a peer has ended. The sender announces its address,
// and the receiver answers when it has read.
//
// In all three the receiver's own process, or its own network device, writes the receiver's memory. So nothing writes
// there once close() has destroyed the worker. ucp_put_nbx would be an alternative, but UCX 1.13 has no put over TCP:
// it emulates it, slower than a rendezvous, and aborts the target's process ("unexpected error: Endpoint timeout") if
// the initiator ends too early. Inside a host, a process that was suspended while it writes to ours could finish later.
//
// UCX detects the kind of memory: a message of more than kEagerBytes may be in the memory of a GPU. That has not been
// run on a GPU.
#pragma once

#include "executor/backends/peer_memory.h"
#include "executor/backends/ucx_worker.h"
#include "executor/interfaces/channel.h"

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::ucx {

/// Longer messages are announced.
constexpr uint64_t kEagerBytes = 2048;
/// The most messages with data that one peer has sent and this process has not received. Beyond it, short messages are
/// sent by rendezvous too, so that a fast sender does not fill the memory of a slow receiver.
constexpr uint64_t kWindow = 16;

/// Calls of ucp_worker_progress for work that is ready.
constexpr int kMoreProgress = 100;

/// The identifiers of active messages.
enum Id : unsigned {
  kMessage, // with its data, or by UCX's rendezvous
  kReadMe,  // a message that the receiver reads out of the sender's memory
  kRead,    // it has read message `number`
  kReader,  // its sender can read the receiver's memory
  kCredit,  // its sender has received `number` messages with data, ever
  kProbe,   // its sender waits for the receiver; if the connection is lost, sending reveals it
  kLoss,    // its sender fails because of rank `number`; with the reason as text
  kRun,     // its sender begins run `number`
  kIds,
};

/// Begins each active message.
struct Header {
  uint64_t session = 0;
  uint64_t number = 0; // counts the messages from `rank` to the receiver, from 0 on
  uint64_t bytes = 0;
  uint64_t address = 0; // for kReadMe
  uint32_t rank = 0, tag = 0;
};

/// A message that waits for its receive: its bytes have arrived, or been announced.
struct Arrival {
  Header header;
  Id id = kMessage;
  size_t place = 0;           // where bytes that have arrived lie in the inbox
  void *descriptor = nullptr; // set if UCX announces the bytes by a rendezvous
  bool eager() const { return id == kMessage && !descriptor; }
};

/// The bytes of the arrivals of one peer.
struct Inbox {
  std::byte memory[kWindow][kEagerBytes];
  bool used[kWindow] = {};
};

/// A header that is being sent. UCX may read it until the request is complete.
struct Notice {
  Header header;
  void *request = nullptr;
};

/// Why a peer is lost.
struct Loss {
  uint32_t rank = 0;  // the rank that failed first, as far as this process knows
  std::string reason; // names that rank
};

struct Peer {
  ucp_ep_h connection = nullptr;
  std::string hello;        // what the connection's process has published
  std::optional<Loss> loss; // once it is lost
  PeerMemory memory;
  bool readsOurs = false;  // the peer can read our memory
  bool fresh = false;      // some arrivals are not admitted
  uint64_t sent = 0;       // messages
  uint64_t eagerSent = 0;  // how many of these have data
  uint64_t eagerTaken = 0; // how many of these the peer has received, as far as we know
  uint64_t admitted = 0;   // messages that have arrived, up to the first gap
  uint64_t taken = 0;      // messages with data that we have received
  uint64_t run = 0;        // the last one that the peer has begun
  Notice reader, credit, probe, farewell, begins;
  /// All of the above.
  std::array<Notice *, 5> notices() { return {&reader, &credit, &probe, &farewell, &begins}; }
  std::chrono::steady_clock::time_point probed; // when the last probe was sent
  std::vector<Arrival> arrivals;
  std::unique_ptr<Inbox> inbox; // made for its first message
  std::vector<size_t> receives; // requests without a message, in the order of the calls
};

struct Request {
  enum State {
    kDone,
    kWaits,  // a receive waits for its message
    kMoves,  // UCX moves its bytes, or sends its header
    kReads,  // a receive reads the sender's memory
    kIsRead, // a send waits until the receiver has read
    kFails   // its peer is lost
  };
  State state = kDone;
  bool sends = false;
  uint32_t peer = 0, tag = 0;
  std::byte *data = nullptr;
  uint64_t bytes = 0;
  Notice notice;               // a send's message, or a receive's kRead. Its request also moves the bytes of a message.
  uint64_t from = 0, read = 0; // for kReads: the sender's address, and bytes that are copied
  Status error;                // a message of another size
};

class UcxChannel : public Channel {
public:
  explicit UcxChannel(const ChannelOptions &options);
  UcxChannel(const UcxChannel &) = delete;
  UcxChannel &operator=(const UcxChannel &) = delete;
  ~UcxChannel() override;

  /// Publishes the worker's address and waits until all processes have joined.
  Status join(const Deadline &deadline);

  uint32_t rank() const override { return rendezvous_->rank(); }
  uint32_t size() const override { return static_cast<uint32_t>(peers_.size()); }
  uint32_t maxTag() const override { return INT32_MAX; }
  void reserve(size_t requests) override;
  Status registerMemory(std::byte *data, uint64_t bytes) override;
  void keepMemory(const std::vector<MemoryRange> &ranges) override;
  Status rejoin(Rendezvous &rendezvous, const Deadline &deadline) override;
  Status connect(uint32_t peer) override;
  Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override;
  Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override;
  Result<bool> test(size_t request) override;
  Status check(uint32_t peer) override;
  void tellRun(uint32_t peer, uint64_t run) override;
  std::optional<uint64_t> lastRunOf(uint32_t peer) const override { return peers_[peer].run; }
  bool abandon(const Status &reason) override;

private:
  /// A connection of an earlier rendezvous. Its peer may be in this one, too.
  struct Former {
    ucp_ep_h connection = nullptr;
    bool lost = false;
  };

  Status openWorker();
  Status connectBy(uint32_t peer, const Deadline &deadline);
  /// Waits, for kSettleSeconds at most, until the headers of all peers are sent.
  void settle();
  /// The connection to the process of a hello, if an earlier rendezvous has made it; else null.
  ucp_ep_h formerConnection(const std::string &hello);
  /// Closes the connections of `former_` that remain.
  void closeFormer();
  /// Checks the arguments of a message, connects to its peer and sets the request.
  Status begin(size_t request, const Request &message);
  void progress();
  /// Gives the messages of a peer, in the order of their numbers, to the receives that wait for them.
  void admit(uint32_t rank);
  /// The message that a new receive gets; null if it has not arrived.
  const Arrival *arrivalFor(const Request &receive) const;
  /// Starts to move the bytes of an arrival to a receive.
  void take(size_t request, const Arrival &arrival);
  /// Reads the next part of a message out of the sender's memory.
  void readPart(size_t request);
  /// Fails if a peer for which this process waits is lost. Otherwise sends it a probe, if the last one is old. A peer
  /// that is stopped is not lost: its kernel accepts probes.
  Status checkPeer(uint32_t rank);
  /// Sets why a peer is lost, unless that is known.
  void lose(uint32_t rank, const std::string &reason);
  void lose(uint32_t rank, ucs_status_t status);
  /// The error of a lost peer, for the caller.
  Status report(uint32_t rank);
  /// Tells the peers which rank failed first, and why.
  void sendReason(const Status &reason);
  /// Sends a header, with a text if there is one; false if an earlier one of this notice is still being sent.
  bool notify(Notice &notice, Id id, uint32_t rank, uint64_t number, std::string_view text = {});
  /// Sets the memory handle of an operation.
  void describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) const;
  void dropArrivals(Peer &peer);
  /// Frees all that the channel has of UCX: nothing writes to the memory of messages later. `force`: without waiting
  /// for peers.
  void close(bool force);

  /// The callbacks of active messages and of a lost connection; `channel` is a UcxChannel.
  template <Id id>
  static ucs_status_t onMessage(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                                const ucp_am_recv_param_t *param);
  static void onFailure(void *channel, ucp_ep_h connection, ucs_status_t status);
  /// Stores a message for admit(). Returns whether UCX must keep `data`, the descriptor of a rendezvous.
  bool arrive(Arrival arrival, const void *data, size_t bytes);
  /// Handles a header alone.
  void notified(Id id, const Header &header, std::string_view text);

  Rendezvous *rendezvous_;
  const double seconds_;
  Interrupt *const interrupt_;
  Worker worker_;
  std::vector<Peer> peers_;              // by rank
  std::map<std::string, Former> former_; // by hello
  std::vector<std::vector<Peer>> ended_; // peers of earlier rendezvous: UCX may still read their headers
  std::vector<uint32_t> fresh_;          // ranks of peers with arrivals that are not admitted
  std::vector<Request> requests_;
  std::vector<size_t> reading_;  // requests of state kReads, in the order of their beginning
  std::optional<Loss> reported_; // the first one
  bool ran_ = false;             // a run has begun
  std::byte nothing_{};          // sent in place of no bytes, which UCX does not send by rendezvous
};

} // namespace reshard::ucx
