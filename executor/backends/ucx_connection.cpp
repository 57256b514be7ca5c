// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: UCX's context and worker, the connections, and registered memory.
#include "executor/backends/ucx_connection.h"

#include "base/backoff.h"
#include "base/hash.h"
#include "base/random.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sys/uio.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>
#include <utility>

namespace reshard::ucx {
namespace {

constexpr char kTcpPart[] = "2m";
constexpr size_t kSpare = 64, kShort = 512; // short posts that are kept, and the bytes of each

/// Begins an address; that of the worker follows.
struct Handshake {
  char protocol[kProtocolBytes];
  uint64_t token;
  uint64_t check; // a hash of all, with 0 here
  PeerMemory::Address memory;
};
static_assert(sizeof(Handshake) == kGreetingBytes);

uint64_t checkOf(Handshake handshake, std::string_view worker) {
  handshake.check = 0;
  std::string all(reinterpret_cast<const char *>(&handshake), sizeof handshake);
  return hashOf(all.append(worker));
}

/// Success, or an error that names the function of UCX.
Status checked(ucs_status_t status, const char *call) {
  return status == UCS_OK ? Status() : failed(std::string(call) + ": " + ucs_status_string(status));
}

/// UCX reports that a connection is lost.
void onFailure(void *connection, ucp_ep_h, ucs_status_t status) { static_cast<Connection *>(connection)->fail(status); }

} // namespace

std::optional<ucs_status_t> resultOf(void *&request) {
  const bool ended = !UCS_PTR_IS_PTR(request);
  const ucs_status_t status = ended ? UCS_PTR_RAW_STATUS(request) : ucp_request_check_status(request);
  if (status == UCS_INPROGRESS)
    return {};
  if (!ended)
    ucp_request_free(request);
  request = nullptr;
  return status;
}

bool Connection::pingIsDue(Clock::duration interval) {
  const Clock::time_point now = Clock::now();
  if (isFull() || now - pinged < interval)
    return false;
  pinged = now;
  return true;
}

Status Worker::open(std::string_view protocol, size_t peers, uint64_t features, ucp_am_recv_callback_t received,
                    void *argument) {
  // UCX logs to standard output, where programs write their results. The Status of a call has each error that concerns
  // the caller; the variable UCX_LOG_LEVEL enables the log.
  if (!std::getenv("UCX_LOG_LEVEL"))
    ucs_global_opts_set_value("LOG_LEVEL", "fatal");
  while (spare_.size() < kSpare)
    spare_.emplace_back().bytes.reserve(kShort);
  ucp_config_t *config = nullptr;
  if (Status status = checked(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read"); !status.ok())
    return status;
  // With the scheme put_zcopy, a sender on this host would write to the receiver's memory.
  ucs_status_t status = ucp_config_modify(config, "RNDV_SCHEME", "auto");
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  // Over TCP, a connection must be made without blocking: else UCX sends its first bytes within ucp_ep_create, and
  // aborts this process if the peer has closed by then (1.13 and 1.22 do). UCX 1.17 has changed the names of such
  // options.
  const char *const connect = major == 1 && minor <= 16 ? "CONN_NB" : "TCP_CONN_NB";
  if (status == UCS_OK && !std::getenv("UCX_TCP_CONN_NB"))
    status = ucp_config_modify(config, connect, "y");
  // Over TCP, UCX 1.13 sends a message in parts of 64 KiB, which is slower than MPI. Later versions refuse this
  // name of the option.
  const bool old = major == 1 && minor <= 13;
  if (status == UCS_OK && old && !std::getenv("UCX_TCP_RX_SEG_SIZE"))
    status = ucp_config_modify(config, "RX_SEG_SIZE", kTcpPart);
  // Over TCP, UCX 1.13 must copy what it sends: it aborts this process if a connection fails while it sends the
  // caller's memory (uct_tcp_ep_sendv completes the operation twice).
  constexpr std::pair<const char *, const char *> kCopies[] = {{"ZCOPY_THRESH", "inf"}, {"TX_SEG_SIZE", "64k"}};
  // Messages with a tag also need:
  // RNDV_THRESH: all are sent at once. For a rendezvous the two ends first exchange numbers of their connection, and
  //   UCX aborts this process if the peer is killed meanwhile.
  // MAX_POLL: UCX handles one socket event at a time. The handler of one may free the connection of the next.
  constexpr std::pair<const char *, const char *> kTagged[] = {{"RNDV_THRESH", "inf"}, {"MAX_POLL", "1"}};
  for (const auto &[name, value] : kCopies)
    if (status == UCS_OK && old)
      status = ucp_config_modify(config, name, value);
  for (const auto &[name, value] : kTagged)
    if (status == UCS_OK && old && (features & UCP_FEATURE_TAG) != 0)
      status = ucp_config_modify(config, name, value);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = features;
  params.estimated_num_eps = peers;
  if (status == UCS_OK)
    status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK)
    return checked(status, "ucp_init");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED; // the caller may use several threads, one at a time
  if (Status created = checked(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create"); !created.ok())
    return created;
  // UCX ends a process that receives active messages and has no function for them.
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = received;
  handler.arg = argument;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status != UCS_OK)
    return checked(status, "ucp_worker_set_am_recv_handler");
  ucp_address_t *own = nullptr;
  size_t bytes = 0;
  status = ucp_worker_get_address(worker_, &own, &bytes);
  if (status != UCS_OK)
    return checked(status, "ucp_worker_get_address");
  protocol_.assign(protocol).resize(kProtocolBytes);
  token_ = randomNumber();
  Handshake handshake{{}, token_, 0, PeerMemory::own()};
  std::memcpy(handshake.protocol, protocol_.data(), kProtocolBytes);
  const std::string_view rest(reinterpret_cast<const char *>(own), bytes);
  handshake.check = checkOf(handshake, rest);
  address_.assign(reinterpret_cast<const char *>(&handshake), sizeof handshake).append(rest);
  ucp_worker_release_address(worker_, own);
  return {};
}

void Worker::close() {
  busy_.clear();
  for (const auto &connection : connections_) {
    for (const Post &post : connection->posts)
      ucp_request_free(post.request);
    if (connection->flush)
      ucp_request_free(connection->flush);
    closeAtOnce(*connection);
  }
  if (worker_)
    ucp_worker_destroy(std::exchange(worker_, nullptr)); // ends the operations that use registered memory
  connections_.clear();                                  // UCX may access their messages until then
  unregisterIf([](const Region &) { return true; });
  if (context_)
    ucp_cleanup(std::exchange(context_, nullptr));
}

Connection *Worker::connect(std::string_view address) {
  Handshake handshake;
  if (address.size() <= sizeof handshake || address.substr(0, kProtocolBytes) != protocol_)
    return nullptr;
  std::memcpy(&handshake, address.data(), sizeof handshake);
  if (handshake.check != checkOf(handshake, address.substr(sizeof handshake)))
    return nullptr;
  Connection &connection = *connections_.emplace_back(std::make_unique<Connection>());
  busy_.reserve(connections_.capacity());
  connection.address = address;
  connection.token = handshake.token;
  connection.memory.open(handshake.memory);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(connection.address.data() + sizeof handshake);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&onFailure, &connection};
  if (const ucs_status_t status = ucp_ep_create(worker_, &params, &connection.endpoint); status != UCS_OK) {
    connection.fail(status);
    connection.endpoint = nullptr;
  }
  return &connection;
}

void Worker::post(Connection &connection, std::string_view head, std::string_view rest, size_t header) {
  if (connection.failure != UCS_OK)
    return;
  if (spare_.empty())
    spare_.emplace_back();
  connection.posts.splice(connection.posts.end(), spare_, spare_.begin());
  Post &post = connection.posts.back();
  post.bytes.assign(head).append(rest);
  const char *const data = post.bytes.data();
  ucp_request_param_t param{};
  if (header > 0) {
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    post.request =
        ucp_am_send_nbx(connection.endpoint, 0, data, header, data + header, post.bytes.size() - header, &param);
  } else {
    post.request = ucp_tag_send_nbx(connection.endpoint, data, post.bytes.size(), connection.token, &param);
  }
  if (const std::optional<ucs_status_t> result = resultOf(post.request)) {
    connection.fail(*result);
    release(connection, std::prev(connection.posts.end()));
  } else if (connection.posts.size() == 1) {
    busy_.push_back(&connection);
  }
}

void Worker::release(Connection &connection, std::list<Post>::iterator post) {
  if (spare_.size() < kSpare && post->bytes.capacity() <= kShort)
    spare_.splice(spare_.begin(), connection.posts, post);
  else
    connection.posts.erase(post);
}

void Worker::disconnect(Connection &connection, bool nothingWaits) {
  const ucp_request_param_t param{};
  connection.flush = nothingWaits || !connection.endpoint ? nullptr : ucp_ep_flush_nbx(connection.endpoint, &param);
  if (resultOf(connection.flush))
    closeAtOnce(connection);
  connection.ends = true;
  if (connection.posts.empty())
    busy_.push_back(&connection);
}

void Worker::closeAtOnce(Connection &connection) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE; // then there is no request
  if (connection.endpoint)
    (void)ucp_ep_close_nbx(std::exchange(connection.endpoint, nullptr), &param);
}

bool Worker::isIdle(Connection &connection) {
  for (; !connection.posts.empty(); release(connection, connection.posts.begin())) {
    const std::optional<ucs_status_t> result = resultOf(connection.posts.front().request);
    if (!result)
      break;
    connection.fail(*result);
  }
  if (connection.flush && resultOf(connection.flush))
    closeAtOnce(connection);
  if (!connection.posts.empty() || connection.flush)
    return false;
  if (connection.ends)
    std::erase_if(connections_, [&](const auto &each) { return each.get() == &connection; });
  return true;
}

void Worker::progress() {
  ucp_worker_progress(worker_);
  std::erase_if(busy_, [this](Connection *connection) { return isIdle(*connection); });
}

void Worker::finish(const Deadline &deadline) {
  for (Backoff backoff; !busy_.empty() && !passed(deadline); backoff.wait())
    progress();
}

Status Worker::registerMemory(std::byte *data, uint64_t bytes) {
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

void Worker::unregisterIf(const std::function<bool(const Region &)> &useless) {
  std::erase_if(regions_, [&](const Region &region) {
    const bool dropped = useless(region);
    if (dropped)
      ucp_mem_unmap(context_, region.handle);
    return dropped;
  });
}

const Region *Worker::regionOf(const std::byte *data, uint64_t bytes) const {
  const auto region =
      std::partition_point(regions_.begin(), regions_.end(), [&](const Region &r) { return r.end <= data; });
  return region != regions_.end() && region->begin <= data && data + bytes <= region->end ? &*region : nullptr;
}

PeerMemory::Address PeerMemory::own() {
  static const uint64_t token = randomNumber();
  return {hostId(), static_cast<uint64_t>(getpid()), token, reinterpret_cast<uint64_t>(&token)};
}

bool PeerMemory::open(const Address &address) {
  if (address.host != hostId() || address.process == 0 || address.process > INT32_MAX)
    return false;
  process_ = static_cast<int32_t>(address.process);
  address_ = address;
  if (!isAlive())
    process_ = 0;
  return isOpen();
}

bool PeerMemory::isAlive() const {
  uint64_t found = 0;
  return read(reinterpret_cast<std::byte *>(&found), address_.at, sizeof found) && found == address_.token;
}

bool PeerMemory::read(std::byte *to, uint64_t from, uint64_t bytes) const {
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void *>(from), bytes}; // NOLINT(performance-no-int-to-ptr): of another process
    const ssize_t copied = process_vm_readv(process_, &local, 1, &remote, 1, 0);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR)
        continue;
      return false;
    }
    to += copied;
    from += static_cast<uint64_t>(copied);
    bytes -= static_cast<uint64_t>(copied);
  }
  return true;
}

bool PeerMemory::readPart(std::byte *to, uint64_t from, uint64_t bytes, uint64_t &copied) const {
  constexpr uint64_t kPartBytes = 1 << 20;
  const uint64_t begin = copied, part = std::min(kPartBytes, bytes - begin);
  copied += part;
  return read(to + begin, from + begin, part);
}

} // namespace reshard::ucx
