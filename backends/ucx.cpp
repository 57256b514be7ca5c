// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: a channel over UCP, the protocol layer of UCX 1.13 or a later 1.x. Each channel has a context and
// a worker of its own, so that a process can close one channel and open another, also after a failure.
//
// Each message is one active message whose header has its number. A message of at most kEagerBytes carries its data. A
// longer one is sent by UCX's rendezvous: the sender announces its memory, and when the receive is posted, UCX moves
// the bytes between the memory of both, without a copy by either. Always the receiver's own process writes the
// receiver's memory (it reads a TCP connection, or the memory of a sender on its host) or its own network device does.
// So nothing can write there after close() has destroyed the worker.
//
// ucp_put_nbx would be an alternative, but UCX 1.13 has no put over TCP: it emulates it, slower than a rendezvous, and
// aborts the target's process ("unexpected error: Endpoint timeout") if the initiator ends before the target has
// confirmed. Inside a host it would let a process that was suspended in process_vm_writev write after we have returned.
//
// UCX detects the kind of memory, so a message of more than kEagerBytes may be in the memory of a GPU. That has not
// been run on a GPU.

#include "executor/channel.h"

#include <ucp/api/ucp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <sched.h>
#include <vector>

namespace reshard {
namespace {

/// The identifiers of active messages.
constexpr unsigned kMessage = 0, kCredit = 1;
/// Longer messages are sent by rendezvous.
constexpr uint64_t kEagerBytes = 2048;
/// The most messages with data that one peer has sent and this process has not received. Beyond it, short messages are
/// sent by rendezvous too, so that a fast sender does not fill the memory of a slow receiver.
constexpr uint64_t kWindow = 16;
/// The most messages of one peer that wait for their receive: kWindow, and one for each request of the peer. More are
/// an error.
constexpr size_t kMostArrivals = size_t{1} << 16;
constexpr char kHello[] = "reshard-ucx-1:"; // the worker's address follows
/// Seconds that close() waits for the endpoints after a failure.
constexpr double kForcedSeconds = 1;
constexpr int kMoreProgress = 100;

/// Of each active message. Of kCredit: `number` is how many messages with data the sender has received, ever.
struct Header {
  uint64_t session = 0;
  uint64_t number = 0; // of all messages from `rank` to the receiver, from 0 on
  uint64_t bytes = 0;
  uint32_t rank = 0, tag = 0;
};

/// A message that waits for its receive: its bytes have arrived, or been announced by rendezvous.
struct Arrival {
  uint64_t number = 0, bytes = 0;
  uint32_t tag = 0;
  uint32_t slot = 0;         // of its bytes; not used if announced
  void *announced = nullptr; // UCX's descriptor
};

/// The bytes of arrivals of one peer.
struct Slots {
  std::byte memory[kWindow][kEagerBytes];
  bool used[kWindow] = {};
};

struct Peer {
  ucp_ep_h endpoint = nullptr;
  Status failure;          // once the connection is lost
  bool fresh = false;      // some arrivals are not admitted
  uint64_t sent = 0;       // messages
  uint64_t eagerSent = 0;  // of these, with data
  uint64_t eagerTaken = 0; // of these, received by the peer as far as we know
  uint64_t admitted = 0;   // messages that have arrived, up to the first gap
  uint64_t taken = 0;      // messages with data that we have received
  Header credit;           // the last one, which must outlive its request
  void *creditRequest = nullptr;
  std::vector<Arrival> arrivals;
  std::unique_ptr<Slots> slots; // made for its first message
  std::vector<size_t> receives; // requests without a message, in the order of the calls
};

struct Request {
  enum State { kDone, kWaits, kMoves }; // waits for an arrival; UCX moves its bytes
  State state = kDone;
  bool sends = false;
  uint32_t peer = 0, tag = 0;
  std::byte *data = nullptr;
  uint64_t bytes = 0;
  void *handle = nullptr; // UCX's request, while it moves bytes
  Header header;          // of a send: must outlive the handle
  Status error;
};

struct Region {
  std::byte *begin, *end;
  ucp_mem_h handle;
};

Status lost(uint32_t rank, ucs_status_t status) {
  return failed("the connection to rank " + std::to_string(rank) + " is lost: " + ucs_status_string(status) +
                " (UCX); see whether that process has ended");
}

Status checked(ucs_status_t status, const char *call) {
  return status == UCS_OK ? Status() : failed(std::string(call) + ": " + ucs_status_string(status));
}

Deadline deadlineAfter(double seconds) {
  if (seconds <= 0)
    return {};
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

class UcxChannel : public Channel {
public:
  explicit UcxChannel(const ChannelOptions &options)
      : rendezvous_(*options.rendezvous), seconds_(options.seconds), peers_(rendezvous_.size()) {
    fresh_.reserve(peers_.size());
  }
  UcxChannel(const UcxChannel &) = delete;
  UcxChannel &operator=(const UcxChannel &) = delete;
  ~UcxChannel() override {
    const bool idle = std::all_of(requests_.begin(), requests_.end(),
                                  [](const Request &request) { return request.state == Request::kDone; });
    close(!idle);
  }

  /// Publishes the worker's address and waits until all processes have joined.
  Status join();

  uint32_t rank() const override { return rendezvous_.rank(); }
  uint32_t size() const override { return static_cast<uint32_t>(peers_.size()); }
  uint32_t maxTag() const override { return INT32_MAX; }
  void reserve(size_t requests) override { requests_ = std::vector<Request>(requests); }
  Status registerMemory(std::byte *data, uint64_t bytes) override;
  Status send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) override;
  Status receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) override;
  Result<bool> test(size_t request) override;
  bool abandon() override { return close(true); }

private:
  /// Checks the arguments of a message, connects to its peer and sets the request.
  Status begin(size_t request, const Request &message);
  /// Creates the endpoint of a peer at its first use.
  Status connect(uint32_t rank);
  void progress();
  /// Gives the messages of a peer, in the order of their numbers, to the receives that wait for them.
  void admit(uint32_t rank);
  /// Starts to move the bytes of an arrival to a receive.
  void take(Request &request, const Arrival &arrival);
  /// Tells the peer how many of its messages with data have been received.
  void sendCredit(uint32_t rank);
  /// UCX's handle of registered memory; null if it is not registered as a whole.
  ucp_mem_h handleOf(const std::byte *data, uint64_t bytes) const;
  /// Sets the memory handle of an operation.
  void describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) const;
  /// Frees all that the channel has of UCX: nothing writes to the memory of messages later. `force`: without waiting
  /// for peers. Returns whether all endpoints were closed in time.
  bool close(bool force);

  /// The peer of an active message with a valid header; null if it must be dropped: then another job sent it.
  Peer *senderOf(const void *header, size_t headerBytes, Header &copy);
  static ucs_status_t onMessage(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                                const ucp_am_recv_param_t *param);
  static ucs_status_t onCredit(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                               const ucp_am_recv_param_t *param);
  static void onFailure(void *channel, ucp_ep_h endpoint, ucs_status_t status);

  Rendezvous &rendezvous_;
  const double seconds_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;     // by rank
  std::vector<uint32_t> fresh_; // ranks of peers with arrivals that are not admitted
  std::vector<Request> requests_;
  std::vector<Region> regions_; // sorted, without overlaps
  std::byte nothing_{};         // sent in place of no bytes, which UCX does not send by rendezvous
};

Status UcxChannel::join() {
  ucp_config_t *config = nullptr;
  if (Status status = checked(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read"); !status.ok())
    return status;
  // The receiver reads the memory of a sender on its host, or a connection. With scheme put_zcopy the sender would
  // write to the receiver's memory.
  ucs_status_t set = ucp_config_modify(config, "RNDV_SCHEME", "auto");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_AM;
  params.estimated_num_eps = peers_.size();
  if (set == UCS_OK)
    set = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (set != UCS_OK)
    return checked(set, "ucp_init");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED; // the caller may use several threads, one at a time
  if (Status status = checked(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create"); !status.ok())
    return status;
  for (const auto &[id, callback] : {std::pair(kMessage, &onMessage), std::pair(kCredit, &onCredit)}) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = callback;
    handler.arg = this;
    if (Status status = checked(ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
        !status.ok())
      return status;
  }
  ucp_address_t *address = nullptr;
  size_t bytes = 0;
  if (Status status = checked(ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
      !status.ok())
    return status;
  const std::string hello = kHello + std::string(reinterpret_cast<const char *>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return rendezvous_.join(hello, deadlineAfter(seconds_));
}

Status UcxChannel::connect(uint32_t rank) {
  Peer &peer = peers_[rank];
  if (peer.endpoint || !peer.failure.ok())
    return peer.failure;
  const Result<std::string> hello = rendezvous_.hello(rank, deadlineAfter(seconds_));
  if (!hello.ok())
    return hello.status();
  constexpr size_t kPrefix = sizeof kHello - 1;
  if (hello->compare(0, kPrefix, kHello) != 0 || hello->size() <= kPrefix)
    return failed("rank " + std::to_string(rank) + " has another transport or version of reshard: expected a hello '" +
                  kHello + "…'");
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(hello->data() + kPrefix);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&onFailure, this};
  if (const ucs_status_t status = ucp_ep_create(worker_, &params, &peer.endpoint); status != UCS_OK) {
    peer.endpoint = nullptr;
    return failed("cannot connect to rank " + std::to_string(rank) + ": " + ucs_status_string(status) + " (UCX)");
  }
  peer.arrivals.reserve(kWindow + requests_.size());
  peer.receives.reserve(requests_.size());
  return {};
}

Status UcxChannel::registerMemory(std::byte *data, uint64_t bytes) {
  if (!worker_)
    return invalid("the channel is closed");
  if (bytes == 0 || handleOf(data, bytes))
    return {};
  const auto after = std::find_if(regions_.begin(), regions_.end(), [&](const Region &r) { return data < r.end; });
  if (after != regions_.end() && after->begin < data + bytes)
    return invalid("memory is registered twice: ranges overlap");
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = data;
  params.length = bytes;
  ucp_mem_h handle = nullptr;
  if (const ucs_status_t status = ucp_mem_map(context_, &params, &handle); status != UCS_OK)
    return failed("ucp_mem_map of " + std::to_string(bytes) + " bytes: " + ucs_status_string(status));
  regions_.insert(after, {data, data + bytes, handle});
  return {};
}

ucp_mem_h UcxChannel::handleOf(const std::byte *data, uint64_t bytes) const {
  const auto region =
      std::partition_point(regions_.begin(), regions_.end(), [&](const Region &r) { return r.end <= data; });
  return region != regions_.end() && region->begin <= data && data + bytes <= region->end ? region->handle : nullptr;
}

void UcxChannel::describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) const {
  if (ucp_mem_h handle = bytes > kEagerBytes ? handleOf(data, bytes) : nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = handle;
  }
}

Status UcxChannel::begin(size_t request, const Request &message) {
  if (!worker_)
    return invalid("the channel is closed: a run has failed");
  if (message.peer >= size() || message.tag > maxTag() || message.bytes > kMaxChannelBytes)
    return invalid("a message of " + std::to_string(message.bytes) + " bytes with tag " + std::to_string(message.tag) +
                   " for rank " + std::to_string(message.peer) + ", expected at most " +
                   std::to_string(kMaxChannelBytes) + " bytes, a tag of at most " + std::to_string(maxTag()) +
                   " and a rank below " + std::to_string(size()));
  if (Status status = connect(message.peer); !status.ok())
    return status;
  requests_[request] = message;
  return {};
}

Status UcxChannel::send(size_t request, uint32_t peer, uint32_t tag, const std::byte *data, uint64_t bytes) {
  Request message;
  message.sends = true;
  message.peer = peer;
  message.tag = tag;
  message.bytes = bytes;
  if (Status status = begin(request, message); !status.ok())
    return status;
  Peer &to = peers_[peer];
  Request &mine = requests_[request];
  const bool eager = bytes <= kEagerBytes && to.eagerSent - to.eagerTaken < kWindow;
  mine.header = {rendezvous_.session(), to.sent++, bytes, rank(), tag};
  to.eagerSent += eager;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = eager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  describe(param, data, bytes);
  const bool nothing = !eager && bytes == 0;
  mine.handle = ucp_am_send_nbx(to.endpoint, kMessage, &mine.header, sizeof mine.header, nothing ? &nothing_ : data,
                                nothing ? 1 : bytes, &param);
  if (UCS_PTR_IS_ERR(mine.handle))
    return lost(peer, UCS_PTR_STATUS(std::exchange(mine.handle, nullptr)));
  mine.state = mine.handle ? Request::kMoves : Request::kDone;
  return {};
}

Status UcxChannel::receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) {
  Request message;
  message.peer = peer;
  message.tag = tag;
  message.data = data;
  message.bytes = bytes;
  message.state = Request::kWaits;
  if (Status status = begin(request, message); !status.ok())
    return status;
  Peer &from = peers_[peer];
  // Those below `admitted` have no receive yet, and lie in the order of their numbers.
  const auto arrival = std::find_if(from.arrivals.begin(), from.arrivals.end(), [&](const Arrival &each) {
    return each.tag == tag && each.number < from.admitted;
  });
  if (arrival == from.arrivals.end()) {
    from.receives.push_back(request);
    return {};
  }
  const Arrival found = *arrival;
  from.arrivals.erase(arrival);
  take(requests_[request], found);
  return {};
}

void UcxChannel::take(Request &request, const Arrival &arrival) {
  Peer &peer = peers_[request.peer];
  request.state = Request::kDone;
  if (arrival.bytes != request.bytes) {
    request.error = failed("received a message of " + std::to_string(arrival.bytes) + " bytes from rank " +
                           std::to_string(request.peer) + ", expected " + std::to_string(request.bytes));
    if (arrival.announced)
      ucp_am_data_release(worker_, arrival.announced);
  } else if (arrival.announced) {
    ucp_request_param_t param{};
    describe(param, request.data, request.bytes);
    const bool nothing = request.bytes == 0;
    request.handle = ucp_am_recv_data_nbx(worker_, arrival.announced, nothing ? &nothing_ : request.data,
                                          nothing ? 1 : request.bytes, &param);
    if (UCS_PTR_IS_ERR(request.handle))
      request.error = lost(request.peer, UCS_PTR_STATUS(std::exchange(request.handle, nullptr)));
  } else if (request.bytes > 0) {
    std::memcpy(request.data, peer.slots->memory[arrival.slot], request.bytes);
  }
  if (request.handle || !request.error.ok())
    request.state = Request::kMoves;
  if (arrival.announced)
    return;
  peer.slots->used[arrival.slot] = false;
  if (++peer.taken - peer.credit.number >= kWindow / 2)
    sendCredit(request.peer);
}

void UcxChannel::sendCredit(uint32_t rank) {
  Peer &peer = peers_[rank];
  if (peer.creditRequest && ucp_request_check_status(peer.creditRequest) == UCS_INPROGRESS)
    return; // a later one includes this
  if (peer.creditRequest)
    ucp_request_free(std::exchange(peer.creditRequest, nullptr));
  peer.credit = {rendezvous_.session(), peer.taken, 0, this->rank(), 0};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  void *const handle = ucp_am_send_nbx(peer.endpoint, kCredit, &peer.credit, sizeof peer.credit, nullptr, 0, &param);
  peer.creditRequest = UCS_PTR_IS_ERR(handle) ? nullptr : handle; // onFailure reports the error
}

void UcxChannel::admit(uint32_t rank) {
  Peer &peer = peers_[rank];
  peer.fresh = false;
  // UCX may pass on messages of different lengths in another order than they were sent.
  for (bool next = true; next;) {
    next = false;
    for (size_t a = 0; a < peer.arrivals.size() && !next; ++a) {
      const Arrival arrival = peer.arrivals[a];
      if (arrival.number != peer.admitted)
        continue;
      next = true;
      ++peer.admitted;
      const auto at = peer.arrivals.begin() + static_cast<ptrdiff_t>(a);
      const auto receive = std::find_if(peer.receives.begin(), peer.receives.end(),
                                        [&](size_t request) { return requests_[request].tag == arrival.tag; });
      if (receive == peer.receives.end()) {
        // Behind the others that are admitted, which lie in front.
        const auto place =
            std::find_if(peer.arrivals.begin(), at, [&](const Arrival &each) { return each.number >= peer.admitted; });
        std::rotate(place, at, at + 1);
        continue;
      }
      peer.arrivals.erase(at);
      Request &request = requests_[*receive];
      peer.receives.erase(receive);
      take(request, arrival);
    }
  }
}

void UcxChannel::progress() {
  ucp_worker_progress(worker_);
  while (!fresh_.empty()) {
    const uint32_t rank = fresh_.back();
    fresh_.pop_back();
    admit(rank);
  }
}

Result<bool> UcxChannel::test(size_t number) {
  if (!worker_)
    return invalid("the channel is closed: a run has failed");
  Request &request = requests_[number];
  if (request.state == Request::kDone)
    return true;
  progress();
  if (request.handle) {
    const ucs_status_t status = ucp_request_check_status(request.handle);
    if (status == UCS_INPROGRESS && peers_[request.peer].failure.ok())
      return false;
    if (status != UCS_INPROGRESS) {
      ucp_request_free(std::exchange(request.handle, nullptr));
      if (status == UCS_OK)
        request.state = Request::kDone;
      else
        request.error = lost(request.peer, status);
    }
  }
  if (request.state == Request::kDone)
    return true;
  if (!request.error.ok())
    return request.error;
  if (const Status &failure = peers_[request.peer].failure; !failure.ok())
    return failure;
  return false;
}

Peer *UcxChannel::senderOf(const void *header, size_t headerBytes, Header &copy) {
  if (headerBytes != sizeof copy)
    return nullptr;
  std::memcpy(&copy, header, sizeof copy);
  return copy.session == rendezvous_.session() && copy.rank < size() ? &peers_[copy.rank] : nullptr;
}

ucs_status_t UcxChannel::onMessage(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                                   const ucp_am_recv_param_t *param) {
  UcxChannel &self = *static_cast<UcxChannel *>(channel);
  const bool eager = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  const ucs_status_t drop = eager ? UCS_OK : UCS_ERR_REJECTED;
  Header message;
  Peer *const peer = self.senderOf(header, headerBytes, message);
  if (!peer)
    return drop;
  if (eager && !peer->slots)
    peer->slots = std::make_unique<Slots>();
  const bool known =
      message.number < peer->admitted || std::any_of(
                                             peer->arrivals.begin(), peer->arrivals.end(),
                                             [&](const Arrival &each) { return each.number == message.number; });
  const auto slot =
      eager ? static_cast<size_t>(std::find(std::begin(peer->slots->used), std::end(peer->slots->used), false) -
                                  std::begin(peer->slots->used))
            : 0;
  const bool fits = eager ? slot < kWindow && bytes == message.bytes && bytes <= kEagerBytes
                          : bytes == std::max<uint64_t>(message.bytes, 1) && bytes <= kMaxChannelBytes &&
                                peer->arrivals.size() < kMostArrivals;
  if (known || !fits) {
    peer->failure = failed("rank " + std::to_string(message.rank) + " sent a message of " + std::to_string(bytes) +
                           " bytes with a wrong header: number " + std::to_string(message.number) + " after " +
                           std::to_string(peer->admitted) + ", " + std::to_string(message.bytes) + " bytes");
    return drop;
  }
  if (eager) {
    peer->slots->used[slot] = true;
    if (bytes > 0)
      std::memcpy(peer->slots->memory[slot], data, bytes);
  }
  peer->arrivals.push_back(
      {message.number, message.bytes, message.tag, static_cast<uint32_t>(slot), eager ? nullptr : data});
  if (!std::exchange(peer->fresh, true))
    self.fresh_.push_back(message.rank);
  return eager ? UCS_OK : UCS_INPROGRESS;
}

ucs_status_t UcxChannel::onCredit(void *channel, const void *header, size_t headerBytes, void *, size_t,
                                  const ucp_am_recv_param_t *param) {
  UcxChannel &self = *static_cast<UcxChannel *>(channel);
  Header credit;
  // A credit beyond the messages that were sent is not ours; credits may arrive in another order than they were sent.
  if (Peer *const peer = self.senderOf(header, headerBytes, credit); peer && credit.number <= peer->eagerSent)
    peer->eagerTaken = std::max(peer->eagerTaken, credit.number);
  return param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV ? UCS_ERR_REJECTED : UCS_OK;
}

void UcxChannel::onFailure(void *channel, ucp_ep_h endpoint, ucs_status_t status) {
  auto &peers = static_cast<UcxChannel *>(channel)->peers_;
  for (size_t rank = 0; rank < peers.size(); ++rank)
    if (peers[rank].endpoint == endpoint && peers[rank].failure.ok())
      peers[rank].failure = lost(static_cast<uint32_t>(rank), status);
}

bool UcxChannel::close(bool force) {
  if (!context_)
    return true;
  std::vector<void *> handles;
  for (Peer &peer : peers_) {
    for (const Arrival &arrival : peer.arrivals)
      if (arrival.announced)
        ucp_am_data_release(worker_, arrival.announced);
    peer.arrivals.clear();
    if (!peer.endpoint)
      continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = force || !peer.failure.ok() ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    void *const handle = ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
    if (handle && !UCS_PTR_IS_ERR(handle))
      handles.push_back(handle);
  }
  const auto closed = [](void *handle) { return ucp_request_check_status(handle) != UCS_INPROGRESS; };
  const Deadline deadline = deadlineAfter(force ? kForcedSeconds : seconds_);
  bool all = false;
  while (worker_ && !(all = std::all_of(handles.begin(), handles.end(), closed)) && !passed(deadline)) {
    ucp_worker_progress(worker_);
    sched_yield();
  }
  for (int more = 0; worker_ && more < kMoreProgress; ++more) // UCX frees what belonged to the endpoints
    ucp_worker_progress(worker_);
  for (const Peer &peer : peers_)
    handles.push_back(peer.creditRequest);
  for (Request &request : requests_)
    handles.push_back(std::exchange(request.handle, nullptr));
  for (void *handle : handles)
    if (handle)
      ucp_request_free(handle);
  for (const Region &region : regions_)
    ucp_mem_unmap(context_, region.handle);
  regions_.clear();
  if (worker_)
    ucp_worker_destroy(std::exchange(worker_, nullptr));
  ucp_cleanup(std::exchange(context_, nullptr));
  return all;
}

Result<Channel *> openUcxChannel(const ChannelOptions &options) {
  if (!options.rendezvous)
    return invalid("transport 'ucx' needs a rendezvous, by which the processes find each other");
  auto channel = std::make_unique<UcxChannel>(options);
  if (Status status = channel->join(); !status.ok())
    return status;
  return channel.release();
}

} // namespace
} // namespace reshard

extern "C" {

extern const uint32_t reshard_open_channel_version = reshard::kChannelVersion;

reshard::Channel *reshard_open_channel(const reshard::ChannelOptions &options, reshard::Status &error) {
  const reshard::Result<reshard::Channel *> channel = reshard::openUcxChannel(options);
  error = channel.status();
  return channel.ok() ? *channel : nullptr;
}
}
