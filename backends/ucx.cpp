// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: opening and closing a channel, its connections and its registered memory.

#include "backends/ucx_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sched.h>
#include <utility>

namespace reshard {
namespace ucx {
namespace {

constexpr char kGreeting[] = "reshard-ucx-1:"; // begins a hello; a PeerMemory::Address and the worker's address follow
constexpr size_t kPrefix = sizeof kGreeting - 1 + sizeof(PeerMemory::Address);
/// Seconds that close() waits for the connections after a failure.
constexpr double kForcedSeconds = 1;
/// After the connections are closed, UCX frees what belonged to them while it makes progress.
constexpr int kMoreProgress = 100;

Deadline deadlineAfter(double seconds) {
  if (seconds <= 0)
    return {};
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

} // namespace

Status lost(uint32_t rank, ucs_status_t status) {
  return failed("the connection to rank " + std::to_string(rank) + " is lost: " + ucs_status_string(status) +
                " (UCX); see whether that process has ended");
}

UcxChannel::UcxChannel(const ChannelOptions &options)
    : rendezvous_(*options.rendezvous), seconds_(options.seconds), peers_(rendezvous_.size()) {
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
  Status status = worker_.open(peers_.size());
  const ucp_am_recv_callback_t callbacks[kIds] = {&onMessage<kMessage>, &onMessage<kReadMe>, &onMessage<kRead>,
                                                  &onMessage<kReader>,  &onMessage<kCredit>, &onMessage<kProbe>};
  for (unsigned id = 0; id < kIds && status.ok(); ++id)
    status = worker_.handle(id, callbacks[id], this);
  return status;
}

Status UcxChannel::join() {
  if (Status status = openWorker(); !status.ok())
    return status;
  const PeerMemory::Address memory = PeerMemory::own();
  std::string hello = kGreeting;
  hello.append(reinterpret_cast<const char *>(&memory), sizeof memory);
  if (Status status = worker_.appendAddress(hello); !status.ok())
    return status;
  return rendezvous_.join(hello, deadlineAfter(seconds_));
}

Status UcxChannel::connect(uint32_t rank) {
  Peer &peer = peers_[rank];
  if (peer.connection || !peer.failure.ok())
    return peer.failure;
  const Result<std::string> hello = rendezvous_.hello(rank, deadlineAfter(seconds_));
  if (!hello.ok())
    return hello.status();
  if (hello->compare(0, sizeof kGreeting - 1, kGreeting) != 0 || hello->size() <= kPrefix)
    return failed("rank " + std::to_string(rank) + " has another transport or version of reshard: expected that its " +
                  "hello begins with '" + kGreeting + "'");
  if (const ucs_status_t status = worker_.connect(hello->data() + kPrefix, {&onFailure, this}, &peer.connection);
      status != UCS_OK)
    return failed("cannot connect to rank " + std::to_string(rank) + ": " + ucs_status_string(status) + " (UCX)");
  peer.arrivals.reserve(kWindow + requests_.size());
  peer.receives.reserve(requests_.size());
  PeerMemory::Address memory;
  std::memcpy(&memory, hello->data() + sizeof kGreeting - 1, sizeof memory);
  if (peer.memory.open(memory))
    notify(peer.reader, kReader, rank, 0);
  return {};
}

Status UcxChannel::registerMemory(std::byte *data, uint64_t bytes) {
  return worker_.isOpen() ? worker_.registerMemory(data, bytes) : invalid("the channel is closed");
}

void UcxChannel::onFailure(void *channel, ucp_ep_h connection, ucs_status_t status) {
  auto &peers = static_cast<UcxChannel *>(channel)->peers_;
  for (size_t rank = 0; rank < peers.size(); ++rank)
    if (peers[rank].connection == connection && peers[rank].failure.ok())
      peers[rank].failure = lost(static_cast<uint32_t>(rank), status);
}

bool UcxChannel::close(bool force) {
  std::vector<void *> handles;
  for (Peer &peer : peers_) {
    for (const Arrival &arrival : peer.arrivals)
      if (arrival.descriptor)
        ucp_am_data_release(worker_, arrival.descriptor);
    peer.arrivals.clear();
    if (!peer.connection)
      continue;
    const bool forced = force || !peer.failure.ok();
    if (void *const handle = Worker::disconnect(std::exchange(peer.connection, nullptr), forced))
      handles.push_back(handle);
  }
  const auto closed = [](void *handle) { return ucp_request_check_status(handle) != UCS_INPROGRESS; };
  const Deadline deadline = deadlineAfter(force ? kForcedSeconds : seconds_);
  bool all = true;
  while (worker_.isOpen() && !(all = std::all_of(handles.begin(), handles.end(), closed)) && !passed(deadline)) {
    ucp_worker_progress(worker_);
    sched_yield();
  }
  for (int more = 0; worker_.isOpen() && more < kMoreProgress; ++more)
    ucp_worker_progress(worker_);
  for (Peer &peer : peers_)
    for (Notice *notice : {&peer.reader, &peer.credit, &peer.probe})
      handles.push_back(std::exchange(notice->request, nullptr));
  for (Request &request : requests_)
    handles.push_back(std::exchange(request.notice.request, nullptr));
  for (void *handle : handles)
    if (handle)
      ucp_request_free(handle);
  worker_.close();
  return all;
}

} // namespace ucx

namespace {

Result<Channel *> openUcxChannel(const ChannelOptions &options) {
  if (!options.rendezvous)
    return invalid("transport 'ucx' needs a rendezvous, by which the processes find each other");
  auto channel = std::make_unique<ucx::UcxChannel>(options);
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
