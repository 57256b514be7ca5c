// SPDX-License-Identifier: Apache-2.0
// The channel of libreshard_ucx.so, over UCP, the protocol layer of UCX 1.13 or a later 1.x. Each channel has a context
// and a worker of its own, so that a process can close one channel and open another, also after a failure.
//
// All is sent as active messages; the header has the session of the rendezvous and the sender's number of the message.
// A message of at most kEagerBytes carries its data. A longer one is sent by UCX's rendezvous: the sender announces its
// memory, and when the receive is posted, UCX moves the bytes from memory to memory, without a copy by either process
// where the network can (over TCP, UCX 1.13 must copy: ucx_connection.cpp).
// Inside a host the receiver instead reads a longer one out of the sender's registered memory (PeerMemory), since
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
//
// A channel can leave the processes of one rendezvous and join those of another (rejoin). Worker, registered memory and
// connections then stay: a process has the same hello in both, as long as its worker is open, so the hello identifies
// the connection to it. Messages of the two cannot be confused, because of the session in their headers. A peer that
// has joined sends at once. So this process progresses its worker before it joins and after it has taken over the new
// session, but not in between, where messages of the new session would be dropped.

#include "executor/interfaces/channel.h"

#include "executor/backends/ucx_arrivals.h"
#include "executor/backends/ucx_connection.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard::ucx {
namespace {

constexpr char kProtocol[] = "reshard-ucx-1:";
/// The most seconds to close the connections. When all messages are complete, only UCX's own handshakes are open: a
/// peer answers them when it next uses UCX, which may be never.
constexpr double kCloseSeconds = 1;
/// The most seconds of abandon() to tell the peers why.
constexpr double kTellSeconds = 0.2;
/// The most seconds to connect to those that are told.
constexpr double kConnectSeconds = 1;
/// The most bytes of the reason that the peers are told.
constexpr size_t kMaxReason = 1024;
/// Calls of ucp_worker_progress for work that is ready.
constexpr int kMoreProgress = 100;
/// The time between two probes of a peer. TCP accepts the first one after the peer has ended; a later one fails.
constexpr std::chrono::milliseconds kProbeInterval{200};

/// Why a peer is lost.
struct Loss {
  uint32_t rank = 0;  // the rank that failed first, as far as this process knows
  std::string reason; // names that rank
};

struct Peer {
  Connection *connection = nullptr;
  std::optional<Loss> loss; // once it is lost
  bool readsOurs = false;   // the peer can read our memory
  bool fresh = false;       // some arrivals are not matched
  uint64_t sent = 0;        // messages
  uint64_t eagerSent = 0;   // the messages among these with data
  uint64_t eagerTaken = 0;  // the messages that the peer has received, as far as we know
  uint64_t taken = 0;       // messages with data that we have received
  uint64_t credited = 0;    // the messages that the peer knows to be received
  uint64_t run = 0;         // the last one that the peer has begun
  ArrivalQueue arrivals;
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
  Header header = {};          // the message that is sent; kRead for a receive
  void *handle = nullptr;      // UCX reads the header, and moves the bytes of a message, until it is complete
  uint64_t from = 0, read = 0; // for kReads: the sender's address, and the number of bytes that are copied
  Status error = {};           // a message of another size
};

std::string lostConnection(uint32_t rank, ucs_status_t status) {
  return "the connection to rank " + std::to_string(rank) + " is lost: " + ucs_status_string(status) +
         " (UCX); see whether that process has ended";
}

/// The processes of a rendezvous, with a connection to each.
class ChannelPeers {
public:
  /// `received` is called with `argument` for each message of a peer.
  ChannelPeers(const ChannelOptions &options, ucp_am_recv_callback_t received, void *argument)
      : rendezvous_(options.rendezvous), seconds_(options.seconds), interrupt_(options.deadline.interrupt),
        received_(received), argument_(argument), peers_(rendezvous_->size()) {}

  uint32_t rank() const { return rendezvous_->rank(); }
  uint32_t size() const { return static_cast<uint32_t>(peers_.size()); }
  uint64_t session() const { return rendezvous_->session(); }
  Peer &operator[](uint32_t rank) { return peers_[rank]; }
  const Peer &operator[](uint32_t rank) const { return peers_[rank]; }
  Worker &worker() { return worker_; }

  /// Allocates what this many requests need of each peer.
  void reserve(size_t requests) {
    requests_ = requests;
    for (Peer &peer : peers_)
      if (peer.connection)
        peer.arrivals.reserve(requests);
  }
  /// Publishes the worker's address and waits until all processes have joined.
  Status join(const Deadline &deadline) {
    Status status =
        worker_.isOpen() ? Status() : worker_.open(kProtocol, peers_.size(), UCP_FEATURE_AM, received_, argument_);
    return status.ok() ? rendezvous_->join(worker_.address(), deadline) : status;
  }
  /// Leaves these processes for those of another rendezvous.
  Status rejoin(Rendezvous &rendezvous, const Deadline &deadline) {
    progressMore(); // UCX reports lost connections
    closeFormer();
    Rendezvous *const before = std::exchange(rendezvous_, &rendezvous);
    if (Status status = join(deadline); !status.ok()) {
      rendezvous_ = before;
      return status;
    }
    std::vector<Peer> old = std::exchange(peers_, std::vector<Peer>(rendezvous.size()));
    reported_.reset();
    ran_ = false;
    for (Peer &peer : old) {
      drop(peer.arrivals);
      if (peer.connection && !peer.loss && peer.connection->failure == UCS_OK)
        former_[peer.connection->address] = peer.connection;
      else if (peer.connection)
        worker_.disconnect(*peer.connection);
    }
    return {};
  }
  Status connect(uint32_t rank) { return connectBy(rank, deadlineIn(seconds_, interrupt_)); }
  /// Sends a header, with a text if there is one; nothing if the peer is lost, or not connected.
  void post(uint32_t rank, Id id, uint64_t number, std::string_view text = {}) {
    Connection *const connection = peers_[rank].connection;
    if (!connection || isLost(rank))
      return;
    const Header header{.session = session(), .number = number, .rank = this->rank(), .id = id};
    worker_.post(*connection, {reinterpret_cast<const char *>(&header), sizeof header}, text, sizeof header);
  }
  void tellRun(uint32_t rank, uint64_t run) {
    ran_ = true;
    if (worker_.isOpen())
      post(rank, kRun, run);
  }

  /// Fails if a peer for which this process waits is lost. Otherwise sends it a probe, if the last one is old. A peer
  /// that is stopped is not lost: its kernel accepts probes.
  Status poll(uint32_t rank) {
    Connection *const connection = peers_[rank].connection;
    if (connection && !isLost(rank) && connection->pingIsDue(kProbeInterval))
      post(rank, kProbe, 0);
    return isLost(rank) ? report(rank) : Status();
  }
  /// Sets why a peer is lost, unless that is known.
  void lose(uint32_t rank, const std::string &reason) {
    if (!isLost(rank))
      peers_[rank].loss = {rank, reason};
  }
  void lose(uint32_t rank, ucs_status_t status) { lose(rank, lostConnection(rank, status)); }
  /// Whether a peer is lost, or its connection.
  bool isLost(uint32_t rank) {
    Peer &peer = peers_[rank];
    if (!peer.loss && peer.connection && peer.connection->failure != UCS_OK)
      peer.loss = {rank, lostConnection(rank, peer.connection->failure)};
    return peer.loss.has_value();
  }
  /// The error of a lost peer, for the caller.
  Status report(uint32_t rank) {
    const Loss &loss = *peers_[rank].loss;
    if (!reported_)
      reported_ = loss;
    return failed(loss.reason + (loss.rank == rank ? ""
                                                   : "; rank " + std::to_string(rank) +
                                                         ", for which this rank waits, failed because of it"));
  }
  /// Tells the peers which rank failed first, and why.
  void tell(const Status &reason) {
    if (!reported_) // no peer is the cause
      reported_ = {rank(), "rank " + std::to_string(rank()) + " has failed: " + reason.message()};
    const std::string_view text = std::string_view(reported_->reason).substr(0, kMaxReason);
    // In prepare all others wait for rank 0, and rank 0 for each of them, whether this process has connected or not.
    const Deadline connected = deadlineIn(kConnectSeconds);
    for (uint32_t peer = 0; !ran_ && peer < (rank() == 0 ? size() : 1) && !passed(connected); ++peer)
      if (peer != rank() && !isLost(peer) && !connectBy(peer, connected).ok())
        break;
    for (uint32_t peer = 0; peer < size(); ++peer)
      post(peer, kLoss, reported_->rank, text);
    worker_.finish(deadlineIn(kTellSeconds));
  }
  /// Ends the connections. `force`: without waiting for peers.
  void disconnect(bool force) {
    if (!force && worker_.isOpen()) {
      closeFormer();
      for (Peer &peer : peers_)
        if (peer.connection)
          worker_.disconnect(*std::exchange(peer.connection, nullptr));
      worker_.finish(deadlineIn(kCloseSeconds, interrupt_));
    }
    // TCP resets a connection that is closed with unread data, and the peer may lose what it has not received.
    progressMore();
    former_.clear();
    for (Peer &peer : peers_) {
      peer.connection = nullptr;
      drop(peer.arrivals);
    }
  }

private:
  Status connectBy(uint32_t rank, const Deadline &deadline) {
    Peer &peer = peers_[rank];
    if (isLost(rank))
      return report(rank);
    if (peer.connection)
      return {};
    const Result<std::string> hello = rendezvous_->hello(rank, deadline);
    if (!hello.ok())
      return hello.status();
    const auto former = former_.find(*hello);
    const bool again = former != former_.end() && former->second->failure == UCS_OK;
    Connection *const connection = again ? former->second : worker_.connect(*hello);
    if (again)
      former_.erase(former);
    if (!connection)
      return failed("rank " + std::to_string(rank) +
                    " has another transport or version of reshard: expected that its hello begins with '" + kProtocol +
                    "'");
    if (const ucs_status_t status = connection->failure; status != UCS_OK) {
      worker_.disconnect(*connection);
      return failed("cannot connect to rank " + std::to_string(rank) + ": " + ucs_status_string(status) + " (UCX)");
    }
    peer.connection = connection;
    peer.arrivals.reserve(requests_);
    if (connection->memory.isOpen())
      post(rank, kReader, 0);
    return {};
  }
  /// Closes the connections of `former_` that remain.
  void closeFormer() {
    for (const auto &[hello, connection] : std::exchange(former_, {}))
      worker_.disconnect(*connection);
  }
  /// Forgets messages that have arrived.
  void drop(ArrivalQueue &arrivals) {
    for (const Arrival &arrival : arrivals.takeAll())
      if (arrival.descriptor)
        ucp_am_data_release(worker_, arrival.descriptor);
  }
  /// Makes progress as long as work is ready.
  void progressMore() {
    for (int more = 0; worker_.isOpen() && more < kMoreProgress; ++more)
      worker_.progress();
  }

  Rendezvous *rendezvous_;
  const double seconds_;
  Interrupt *const interrupt_;
  const ucp_am_recv_callback_t received_;
  void *const argument_;
  Worker worker_;
  std::vector<Peer> peers_; // by rank
  std::map<std::string, Connection *>
      former_; // connections of an earlier rendezvous, by hello; a peer may be in this one, too
  size_t requests_ = 0;
  std::optional<Loss> reported_; // the first one
  bool ran_ = false;             // a run has begun
};

class UcxChannel : public Channel {
public:
  explicit UcxChannel(const ChannelOptions &options) : peers_(options, &onMessage, this) { fresh_.reserve(size()); }
  UcxChannel(const UcxChannel &) = delete;
  UcxChannel &operator=(const UcxChannel &) = delete;
  ~UcxChannel() override {
    const bool idle = std::all_of(requests_.begin(), requests_.end(),
                                  [](const Request &request) { return request.state == Request::kDone; });
    close(!idle);
  }

  Status join(const Deadline &deadline) { return peers_.join(deadline); }

  uint32_t rank() const override { return peers_.rank(); }
  uint32_t size() const override { return peers_.size(); }
  uint32_t maxTag() const override { return INT32_MAX; }
  void reserve(size_t requests) override {
    requests_ = std::vector<Request>(requests);
    reading_.reserve(requests);
    peers_.reserve(requests);
  }
  Status registerMemory(std::byte *data, uint64_t bytes) override {
    if (!worker_.isOpen())
      return invalid("the channel is closed");
    if (!worker_.regionOf(data, bytes))
      worker_.unregisterIf([&](const Region &region) { return region.begin < data + bytes && data < region.end; });
    return worker_.registerMemory(data, bytes);
  }
  void keepMemory(const std::vector<MemoryRange> &ranges) override {
    worker_.unregisterIf([&](const Region &region) {
      return std::none_of(ranges.begin(), ranges.end(), [&](const MemoryRange &range) {
        return range.begin <= region.begin && region.end <= range.end;
      });
    });
  }
  Status rejoin(Rendezvous &rendezvous, const Deadline &deadline) override {
    const bool anew = !worker_.isOpen();
    if (Status status = peers_.rejoin(rendezvous, deadline); !status.ok()) {
      if (anew)
        close(true);
      return status;
    }
    fresh_.clear();
    fresh_.reserve(size());
    reading_.clear();
    return {};
  }
  Status connect(uint32_t peer) override { return peers_.connect(peer); }
  Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override {
    if (Status status = begin(request, {.sends = true, .peer = peer, .tag = tag, .bytes = bytes}); !status.ok())
      return status;
    Peer &to = peers_[peer];
    Request &mine = requests_[request];
    mine.header = {.number = to.sent++, .bytes = bytes, .tag = tag};
    const Region *region = bytes > kEagerBytes && to.readsOurs ? worker_.regionOf(data, bytes) : nullptr;
    if (region && region->host) {
      mine.header.address = reinterpret_cast<uint64_t>(data);
      mine.state = Request::kIsRead;
      start(mine, kReadMe, UCP_AM_SEND_FLAG_EAGER);
    } else {
      const bool eager = bytes <= kEagerBytes && to.eagerSent - to.eagerTaken < kWindow, nothing = !eager && bytes == 0;
      to.eagerSent += eager;
      start(mine, kMessage, eager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV, nothing ? &nothing_ : data,
            nothing ? 1 : bytes);
      mine.state = mine.handle ? Request::kMoves : Request::kDone;
    }
    return peers_.isLost(peer) ? peers_.report(peer) : Status();
  }
  Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override {
    if (Status status =
            begin(request, {.state = Request::kWaits, .peer = peer, .tag = tag, .data = data, .bytes = bytes});
        !status.ok())
      return status;
    ArrivalQueue &arrivals = peers_[peer].arrivals;
    const Arrival *const arrival = arrivals.find(tag);
    if (!arrival) {
      arrivals.wait(request, tag);
      return {};
    }
    const Arrival found = *arrival;
    arrivals.remove(arrival);
    take(request, found);
    return {};
  }
  Result<bool> test(size_t number) override {
    if (!worker_.isOpen())
      return invalid("the channel is closed: a run has failed");
    Request &request = requests_[number];
    if (request.state == Request::kDone)
      return true;
    progress();
    if (!request.error.ok())
      return request.error;
    settle(request);
    if (request.state == Request::kDone)
      return true;
    if (Status status = peers_.poll(request.peer); !status.ok())
      return status;
    return false;
  }
  Status check(uint32_t peer) override {
    if (!worker_.isOpen())
      return invalid("the channel is closed: a run has failed");
    if (Status status = connect(peer); !status.ok())
      return status;
    progress();
    return peers_.poll(peer);
  }
  void tellRun(uint32_t peer, uint64_t run) override { peers_.tellRun(peer, run); }
  std::optional<uint64_t> lastRunOf(uint32_t peer) const override { return peers_[peer].run; }
  bool abandon(const Status &reason) override {
    if (worker_.isOpen())
      peers_.tell(reason);
    close(true);
    return true;
  }

private:
  /// Checks the arguments of a message, connects to its peer and sets the request.
  Status begin(size_t request, const Request &message) {
    if (!worker_.isOpen())
      return invalid("the channel is closed: a run has failed");
    if (message.peer >= size() || message.tag > maxTag() || message.bytes > kMaxChannelBytes)
      return invalid("a message of " + std::to_string(message.bytes) + " bytes with tag " +
                     std::to_string(message.tag) + " for rank " + std::to_string(message.peer) + ", expected at most " +
                     std::to_string(kMaxChannelBytes) + " bytes, a tag of at most " + std::to_string(maxTag()) +
                     " and a rank below " + std::to_string(size()));
    // A message that has arrived is received, even if its sender has ended since.
    if (Status status = connect(message.peer);
        !status.ok() && (message.sends || !peers_[message.peer].arrivals.find(message.tag)))
      return status;
    requests_[request] = message;
    return {};
  }
  void progress() {
    worker_.progress();
    while (!fresh_.empty()) {
      Peer &peer = peers_[fresh_.back()];
      fresh_.pop_back();
      peer.fresh = false;
      while (const std::optional<ArrivalQueue::Match> match = peer.arrivals.match())
        take(match->request, match->arrival);
    }
    if (!reading_.empty())
      readPart(reading_.front());
  }
  /// Starts to move the bytes of an arrival to a receive.
  void take(size_t number, const Arrival &arrival) {
    Request &request = requests_[number];
    Peer &peer = peers_[request.peer];
    request.state = Request::kMoves;
    if (arrival.header.bytes != request.bytes) {
      request.error = failed("received a message of " + std::to_string(arrival.header.bytes) + " bytes from rank " +
                             std::to_string(request.peer) + ", expected " + std::to_string(request.bytes));
      if (arrival.descriptor)
        ucp_am_data_release(worker_, arrival.descriptor);
    } else if (arrival.header.id == kReadMe) {
      request.state = Request::kReads;
      request.from = arrival.header.address;
      request.header.number = arrival.header.number;
      reading_.push_back(number);
    } else if (arrival.descriptor) {
      ucp_request_param_t param{};
      describe(param, request.data, request.bytes);
      const bool nothing = request.bytes == 0;
      request.handle = ucp_am_recv_data_nbx(worker_, arrival.descriptor, nothing ? &nothing_ : request.data,
                                            nothing ? 1 : request.bytes, &param);
      settle(request);
    } else {
      if (request.bytes > 0)
        std::memcpy(request.data, peer.arrivals.bytesOf(arrival), request.bytes);
      request.state = Request::kDone;
    }
    if (!arrival.eager())
      return;
    peer.arrivals.free(arrival);
    if (++peer.taken - peer.credited >= kWindow / 2 && peer.connection && !peer.connection->isFull()) {
      peer.credited = peer.taken; // else a later one includes this
      peers_.post(request.peer, kCredit, peer.taken);
    }
  }
  /// Reads the next part of a message out of the sender's memory.
  void readPart(size_t number) {
    Request &request = requests_[number];
    const bool read =
        peers_[request.peer].connection->memory.readPart(request.data, request.from, request.bytes, request.read);
    if (read && request.read < request.bytes)
      return;
    reading_.erase(reading_.begin());
    request.state = read ? Request::kMoves : Request::kFails;
    if (read) {
      start(request, kRead, UCP_AM_SEND_FLAG_EAGER);
      return;
    }
    // Before it ended, the peer may have sent which rank failed first.
    for (int more = 0; more < kMoreProgress && !peers_.isLost(request.peer); ++more)
      worker_.progress();
    peers_.lose(request.peer, "the memory of rank " + std::to_string(request.peer) +
                                  " cannot be read; see whether that process has ended");
  }
  /// Sends the header of a request, with data if there are any. `flag`: UCP_AM_SEND_FLAG_…
  void start(Request &request, Id id, unsigned flag, const std::byte *data = nullptr, uint64_t bytes = 0) {
    request.header.session = peers_.session();
    request.header.rank = rank();
    request.header.id = id;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flag;
    describe(param, data, bytes);
    void *const handle = ucp_am_send_nbx(peers_[request.peer].connection->endpoint, 0, &request.header, sizeof(Header),
                                         data, bytes, &param);
    if (UCS_PTR_IS_ERR(handle))
      peers_.lose(request.peer, UCS_PTR_STATUS(handle));
    else
      request.handle = handle;
  }
  /// Sets the state of a request whose operation of UCX has ended.
  void settle(Request &request) {
    const std::optional<ucs_status_t> result = resultOf(request.handle);
    if (result && *result != UCS_OK) {
      peers_.lose(request.peer, *result);
      request.state = Request::kFails;
    } else if (result && request.state == Request::kMoves) {
      request.state = Request::kDone;
    }
  }
  /// Sets the memory handle of an operation.
  void describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) {
    if (const Region *region = bytes > kEagerBytes ? worker_.regionOf(data, bytes) : nullptr) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = region->handle;
    }
  }
  /// Frees all that the channel has of UCX: nothing writes to the memory of messages later. `force`: without waiting
  /// for peers.
  void close(bool force) {
    peers_.disconnect(force);
    for (Request &request : requests_)
      if (request.handle)
        ucp_request_free(std::exchange(request.handle, nullptr));
    worker_.close();
  }

  /// UCX has received an active message; `channel` is a UcxChannel.
  static ucs_status_t onMessage(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                                const ucp_am_recv_param_t *param) {
    UcxChannel &self = *static_cast<UcxChannel *>(channel);
    const bool announced = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    const ucs_status_t drop = announced ? UCS_ERR_REJECTED : UCS_OK;
    Header own;
    if (headerBytes != sizeof own)
      return drop;
    std::memcpy(&own, header, sizeof own);
    if (own.session != self.peers_.session() || own.rank >= self.size())
      return drop; // it is a message of another job
    if (own.id == kMessage || own.id == kReadMe)
      return self.arrive({own, 0, announced ? data : nullptr}, data, bytes) ? UCS_INPROGRESS : drop;
    if (!announced)
      self.notified(own, {static_cast<const char *>(data), bytes});
    return drop;
  }
  /// Stores a message until progress(). Returns whether UCX must keep `data`, the descriptor of a rendezvous.
  bool arrive(const Arrival &arrival, const void *data, size_t bytes) {
    const Header &header = arrival.header;
    Peer &peer = peers_[header.rank];
    const bool allowed = header.id != kReadMe || (peer.connection && peer.connection->memory.isOpen());
    if (!allowed || !peer.arrivals.add(arrival, data, bytes)) {
      peers_.lose(header.rank, "rank " + std::to_string(header.rank) +
                                   " sent a message that breaks the protocol: number " + std::to_string(header.number) +
                                   " after " + std::to_string(peer.arrivals.admitted()) + ", " +
                                   std::to_string(header.bytes) + " bytes, found " + std::to_string(bytes));
      return false;
    }
    if (!std::exchange(peer.fresh, true))
      fresh_.push_back(header.rank);
    return arrival.descriptor != nullptr;
  }
  /// Handles a header alone.
  void notified(const Header &header, std::string_view text) {
    Peer &peer = peers_[header.rank];
    if (header.id == kReader) {
      peer.readsOurs = true;
    } else if (header.id == kCredit) {
      if (header.number <= peer.eagerSent) // credits may arrive in another order than they were sent
        peer.eagerTaken = std::max(peer.eagerTaken, header.number);
    } else if (header.id == kRead) {
      for (Request &request : requests_)
        if (request.state == Request::kIsRead && request.peer == header.rank && request.header.number == header.number)
          request.state = Request::kMoves;
    } else if (header.id == kRun) {
      peer.run = std::max(peer.run, header.number);
    } else if (header.id == kLoss && header.number < size()) {
      peer.loss = Loss{static_cast<uint32_t>(header.number), std::string(text)};
    }
  }

  ChannelPeers peers_;
  Worker &worker_ = peers_.worker();
  std::vector<uint32_t> fresh_; // ranks of peers with arrivals that are not matched
  std::vector<Request> requests_;
  std::vector<size_t> reading_; // requests of state kReads, in the order of their beginning
  std::byte nothing_{};         // sent in place of no bytes, which UCX does not send by rendezvous
};

Result<Channel *> openUcxChannel(const ChannelOptions &options) {
  if (!options.rendezvous)
    return invalid("transport 'ucx' needs a rendezvous, by which the processes find each other");
  auto channel = std::make_unique<UcxChannel>(options);
  const Deadline deadline =
      options.deadline ? options.deadline : deadlineIn(options.seconds, options.deadline.interrupt);
  if (Status status = channel->join(deadline); !status.ok())
    return status;
  return channel.release();
}

} // namespace
} // namespace reshard::ucx

extern "C" {

extern const uint32_t reshard_open_channel_version = reshard::kChannelVersion;

reshard::Channel *reshard_open_channel(const reshard::ChannelOptions &options, reshard::Status &error) {
  const reshard::Result<reshard::Channel *> channel = reshard::ucx::openUcxChannel(options);
  error = channel.status();
  return channel.ok() ? *channel : nullptr;
}
}
