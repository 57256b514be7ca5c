// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: opening and closing a channel, its connections and its registered memory.

#include "base/backoff.h"
#include "executor/backends/ucx_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace reshard {
namespace ucx {
namespace {

constexpr char kHelloMagic[] =
    "reshard-ucx-1:"; // begins a hello; a PeerMemory::Address and the worker's address follow
constexpr size_t kPrefix = sizeof kHelloMagic - 1 + sizeof(PeerMemory::Address);
/// The most seconds to close the connections. When all messages are complete, only UCX's own handshakes are open: a
/// peer answers them when it next uses UCX, which may be never.
constexpr double kCloseSeconds = 1;
/// The most seconds that abandon() waits until the peers have received the reason.
constexpr double kReasonSeconds = 0.2;
/// The most seconds to connect to the peers that are sent the reason.
constexpr double kConnectSeconds = 1;
/// The most bytes of the reason that is sent to the peers.
constexpr size_t kMaxReasonBytes = 1024;

} // namespace

UcxChannel::UcxChannel(const ChannelOptions &options)
    : rendezvous_(options.rendezvous), seconds_(options.seconds), interrupt_(options.deadline.interrupt),
      peers_(rendezvous_->size()) {
  fresh_.reserve(peers_.size());
}

UcxChannel::~UcxChannel() {
  const bool idle = std::all_of(requests_.begin(), requests_.end(),
                                [](const Request &request) { return request.state == Request::kDone; });
  close(!idle);
}

void UcxChannel::reserve(size_t requests) {
  requests_ = std::vector<Request>(requests);
  reading_.reserve(requests);
  for (Peer &peer : peers_)
    if (peer.connection) {
      peer.arrivals.reserve(kWindow + requests);
      peer.receives.reserve(requests);
    }
}

Status UcxChannel::openWorker() {
  Status status = worker_.open(peers_.size(), UCP_FEATURE_AM);
  const ucp_am_recv_callback_t callbacks[kIds] = {&onMessage<kMessage>, &onMessage<kReadMe>, &onMessage<kRead>,
                                                  &onMessage<kReader>,  &onMessage<kCredit>, &onMessage<kProbe>,
                                                  &onMessage<kLoss>,    &onMessage<kRun>};
  for (unsigned id = 0; id < kIds && status.ok(); ++id)
    status = worker_.handle(id, callbacks[id], this);
  return status;
}

Status UcxChannel::join(const Deadline &deadline) {
  if (Status status = worker_ ? Status() : openWorker(); !status.ok())
    return status;
  const PeerMemory::Address memory = PeerMemory::own();
  std::string hello = kHelloMagic;
  hello.append(reinterpret_cast<const char *>(&memory), sizeof memory);
  if (Status status = worker_.appendAddress(hello); !status.ok())
    return status;
  return rendezvous_->join(hello, deadline);
}

Status UcxChannel::connect(uint32_t rank) { return connectBy(rank, deadlineIn(seconds_, interrupt_)); }

Status UcxChannel::connectBy(uint32_t rank, const Deadline &deadline) {
  Peer &peer = peers_[rank];
  if (peer.loss)
    return report(rank);
  if (peer.connection)
    return {};
  const Result<std::string> hello = rendezvous_->hello(rank, deadline);
  if (!hello.ok())
    return hello.status();
  if (hello->compare(0, sizeof kHelloMagic - 1, kHelloMagic) != 0 || hello->size() <= kPrefix)
    return failed("rank " + std::to_string(rank) + " has another transport or version of reshard: expected that its " +
                  "hello begins with '" + kHelloMagic + "'");
  peer.connection = formerConnection(*hello);
  const ucs_status_t status =
      peer.connection ? UCS_OK : worker_.connect(hello->data() + kPrefix, {&onFailure, this}, &peer.connection);
  if (status != UCS_OK)
    return failed("cannot connect to rank " + std::to_string(rank) + ": " + ucs_status_string(status) + " (UCX)");
  peer.hello = *hello;
  peer.arrivals.reserve(kWindow + requests_.size());
  peer.receives.reserve(requests_.size());
  PeerMemory::Address memory;
  std::memcpy(&memory, hello->data() + sizeof kHelloMagic - 1, sizeof memory);
  if (peer.memory.open(memory))
    notify(peer.reader, kReader, rank, 0);
  return {};
}

Status UcxChannel::registerMemory(std::byte *data, uint64_t bytes) {
  if (!worker_.isOpen())
    return invalid("the channel is closed");
  if (!worker_.regionOf(data, bytes))
    worker_.unregisterIf([&](const Region &region) { return region.begin < data + bytes && data < region.end; });
  return worker_.registerMemory(data, bytes);
}

void UcxChannel::keepMemory(const std::vector<MemoryRange> &ranges) {
  worker_.unregisterIf([&](const Region &region) {
    return std::none_of(ranges.begin(), ranges.end(), [&](const MemoryRange &range) {
      return range.begin <= region.begin && region.end <= range.end;
    });
  });
}

void UcxChannel::onFailure(void *channel, ucp_ep_h connection, ucs_status_t status) {
  UcxChannel &self = *static_cast<UcxChannel *>(channel);
  for (auto &[hello, former] : self.former_)
    former.lost = former.lost || former.connection == connection;
  for (uint32_t rank = 0; rank < self.size(); ++rank)
    if (self.peers_[rank].connection == connection)
      self.lose(rank, status);
}

bool UcxChannel::abandon(const Status &reason) {
  if (worker_)
    sendReason(reason);
  close(true);
  return true;
}

void UcxChannel::sendReason(const Status &reason) {
  if (!reported_) // no peer is the cause
    reported_ = {rank(), "rank " + std::to_string(rank()) + " has failed: " + reason.message()};
  const std::string_view text = std::string_view(reported_->reason).substr(0, kMaxReasonBytes);
  // In prepare all others wait for rank 0, and rank 0 for each of them, whether this process has connected or not.
  const Deadline connected = deadlineIn(kConnectSeconds);
  for (uint32_t peer = 0; !ran_ && peer < (rank() == 0 ? size() : 1) && !passed(connected); ++peer)
    if (peer != rank() && !peers_[peer].loss && !connectBy(peer, connected).ok())
      break;
  for (uint32_t peer = 0; peer < size(); ++peer)
    if (peers_[peer].connection)
      notify(peers_[peer].farewell, kLoss, peer, reported_->rank, text);
  const auto reached = [](const Peer &peer) {
    void *const request = peer.farewell.request;
    return !request || ucp_request_check_status(request) != UCS_INPROGRESS;
  };
  const Deadline deadline = deadlineIn(kReasonSeconds);
  Backoff backoff;
  while (!std::all_of(peers_.begin(), peers_.end(), reached) && !passed(deadline)) {
    worker_.progress();
    backoff.wait();
  }
}

void UcxChannel::dropArrivals(Peer &peer) {
  for (const Arrival &arrival : peer.arrivals)
    if (arrival.descriptor)
      ucp_am_data_release(worker_, arrival.descriptor);
  peer.arrivals.clear();
}

void UcxChannel::close(bool force) {
  if (!force && worker_.isOpen()) {
    closeFormer();
    for (Peer &peer : peers_)
      if (peer.connection)
        worker_.disconnect(peer.connection);
    const Deadline deadline = deadlineIn(kCloseSeconds, interrupt_);
    Backoff backoff;
    while (worker_.disconnects() && !passed(deadline)) {
      worker_.progress();
      backoff.wait();
    }
  }
  // TCP resets a connection that is closed with unread data, and the peer may lose what it has not received.
  for (int more = 0; worker_.isOpen() && more < kMoreProgress; ++more)
    worker_.progress();
  former_.clear();
  for (Peer &peer : peers_) {
    peer.connection = nullptr;
    dropArrivals(peer);
  }
  std::vector<void *> handles;
  for (Peer &peer : peers_)
    for (Notice *notice : peer.notices())
      handles.push_back(std::exchange(notice->request, nullptr));
  for (Request &request : requests_)
    handles.push_back(std::exchange(request.notice.request, nullptr));
  for (std::vector<Peer> &peers : ended_)
    for (Peer &peer : peers)
      for (Notice *notice : peer.notices())
        handles.push_back(std::exchange(notice->request, nullptr));
  for (void *handle : handles)
    if (handle)
      ucp_request_free(handle);
  worker_.close();
  ended_.clear();
}

} // namespace ucx

namespace {

Result<Channel *> openUcxChannel(const ChannelOptions &options) {
  if (!options.rendezvous)
    return invalid("transport 'ucx' needs a rendezvous, by which the processes find each other");
  auto channel = std::make_unique<ucx::UcxChannel>(options);
  const Deadline deadline =
      options.deadline ? options.deadline : deadlineIn(options.seconds, options.deadline.interrupt);
  if (Status status = channel->join(deadline); !status.ok())
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
