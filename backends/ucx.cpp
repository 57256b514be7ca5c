// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: opening and closing a channel, its connections and its registered memory.

#include "backends/ucx_channel.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <utility>

namespace reshard {
namespace ucx {
namespace {

constexpr char kGreeting[] = "reshard-ucx-1:"; // begins a hello; a PeerMemory::Address and the worker's address follow
constexpr size_t kPrefix = sizeof kGreeting - 1 + sizeof(PeerMemory::Address);
constexpr char kTcpPart[] = "2m";
/// Seconds that close() waits for the connections after a failure.
constexpr double kForcedSeconds = 1;
/// After the connections are closed, UCX frees what belonged to them while it makes progress.
constexpr int kMoreProgress = 100;

Status checked(ucs_status_t status, const char *call) {
  return status == UCS_OK ? Status() : failed(std::string(call) + ": " + ucs_status_string(status));
}

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
  ucp_config_t *config = nullptr;
  if (Status status = checked(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read"); !status.ok())
    return status;
  // With the scheme put_zcopy, a sender on this host would write to the receiver's memory.
  ucs_status_t status = ucp_config_modify(config, "RNDV_SCHEME", "auto");
  // Over TCP, UCX 1.13 sends a message in parts of 64 KiB, which takes longer than MPI. Later versions refuse this
  // name of the option.
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  if (status == UCS_OK && minor <= 13 && !std::getenv("UCX_TCP_RX_SEG_SIZE"))
    status = ucp_config_modify(config, "RX_SEG_SIZE", kTcpPart);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_AM;
  params.estimated_num_eps = peers_.size();
  if (status == UCS_OK)
    status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK)
    return checked(status, "ucp_init");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED; // the caller may use several threads, one at a time
  if (Status failure = checked(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create"); !failure.ok())
    return failure;
  const ucp_am_recv_callback_t callbacks[kIds] = {&onMessage<kMessage>, &onMessage<kReadMe>, &onMessage<kRead>,
                                                  &onMessage<kReader>, &onMessage<kCredit>};
  for (unsigned id = 0; id < kIds && status == UCS_OK; ++id) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = callbacks[id];
    handler.arg = this;
    status = ucp_worker_set_am_recv_handler(worker_, &handler);
  }
  return checked(status, "ucp_worker_set_am_recv_handler");
}

Status UcxChannel::join() {
  if (Status status = openWorker(); !status.ok())
    return status;
  ucp_address_t *address = nullptr;
  size_t bytes = 0;
  if (Status status = checked(ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
      !status.ok())
    return status;
  const PeerMemory::Address memory = PeerMemory::own();
  std::string hello = kGreeting;
  hello.append(reinterpret_cast<const char *>(&memory), sizeof memory);
  hello.append(reinterpret_cast<const char *>(address), bytes);
  ucp_worker_release_address(worker_, address);
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
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(hello->data() + kPrefix);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&onFailure, this};
  if (const ucs_status_t status = ucp_ep_create(worker_, &params, &peer.connection); status != UCS_OK) {
    peer.connection = nullptr;
    return failed("cannot connect to rank " + std::to_string(rank) + ": " + ucs_status_string(status) + " (UCX)");
  }
  peer.arrivals.reserve(kWindow + requests_.size());
  peer.receives.reserve(requests_.size());
  PeerMemory::Address memory;
  std::memcpy(&memory, hello->data() + sizeof kGreeting - 1, sizeof memory);
  if (peer.memory.open(memory))
    notify(peer.reader, kReader, rank, 0);
  return {};
}

Status UcxChannel::registerMemory(std::byte *data, uint64_t bytes) {
  if (!worker_)
    return invalid("the channel is closed");
  if (bytes == 0 || regionOf(data, bytes))
    return {};
  const auto after = std::find_if(regions_.begin(), regions_.end(), [&](const Region &r) { return data < r.end; });
  if (after != regions_.end() && after->begin < data + bytes)
    return invalid("memory is registered twice: ranges overlap");
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = data;
  params.length = bytes;
  Region region{data, data + bytes, nullptr, false};
  if (const ucs_status_t status = ucp_mem_map(context_, &params, &region.handle); status != UCS_OK)
    return failed("ucp_mem_map of " + std::to_string(bytes) + " bytes: " + ucs_status_string(status));
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  region.host = ucp_mem_query(region.handle, &attributes) == UCS_OK && attributes.mem_type == UCS_MEMORY_TYPE_HOST;
  regions_.insert(after, region);
  return {};
}

const Region *UcxChannel::regionOf(const std::byte *data, uint64_t bytes) const {
  const auto region =
      std::partition_point(regions_.begin(), regions_.end(), [&](const Region &r) { return r.end <= data; });
  return region != regions_.end() && region->begin <= data && data + bytes <= region->end ? &*region : nullptr;
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
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = force || !peer.failure.ok() ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    void *const handle = ucp_ep_close_nbx(std::exchange(peer.connection, nullptr), &param);
    if (handle && !UCS_PTR_IS_ERR(handle))
      handles.push_back(handle);
  }
  const auto closed = [](void *handle) { return ucp_request_check_status(handle) != UCS_INPROGRESS; };
  const Deadline deadline = deadlineAfter(force ? kForcedSeconds : seconds_);
  bool all = true;
  while (worker_ && !(all = std::all_of(handles.begin(), handles.end(), closed)) && !passed(deadline)) {
    ucp_worker_progress(worker_);
    sched_yield();
  }
  for (int more = 0; worker_ && more < kMoreProgress; ++more)
    ucp_worker_progress(worker_);
  for (Peer &peer : peers_)
    for (Notice *notice : {&peer.reader, &peer.credit})
      handles.push_back(std::exchange(notice->request, nullptr));
  for (Request &request : requests_)
    handles.push_back(std::exchange(request.notice.request, nullptr));
  for (void *handle : handles)
    if (handle)
      ucp_request_free(handle);
  for (const Region &region : regions_)
    ucp_mem_unmap(context_, region.handle);
  regions_.clear();
  if (worker_)
    ucp_worker_destroy(std::exchange(worker_, nullptr));
  if (context_)
    ucp_cleanup(std::exchange(context_, nullptr));
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
