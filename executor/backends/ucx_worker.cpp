// SPDX-License-Identifier: Apache-2.0
// Opens a UCX context and a worker with the options that each version of UCX needs, and registers memory once for each
// region that transfers use.
#include "executor/backends/ucx_worker.h"

#include <ucs/config/global_opts.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace reshard::ucx {
namespace {

constexpr char kTcpPart[] = "2m";

} // namespace

Status checked(ucs_status_t status, const char *call) {
  return status == UCS_OK ? Status() : failed(std::string(call) + ": " + ucs_status_string(status));
}

Status Worker::open(size_t peers, uint64_t features) {
  // UCX logs to standard output, where programs write their results. The Status of a call has each error that concerns
  // the caller; the variable UCX_LOG_LEVEL enables the log.
  if (!std::getenv("UCX_LOG_LEVEL"))
    ucs_global_opts_set_value("LOG_LEVEL", "fatal");
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
  return checked(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create");
}

void Worker::close() {
  for (const ucp_ep_h connection : std::exchange(connections_, {}))
    disconnectAtOnce(connection);
  for (const Closing &each : std::exchange(closing_, {})) {
    ucp_request_free(each.flush);
    disconnectAtOnce(each.connection);
  }
  if (worker_)
    ucp_worker_destroy(std::exchange(worker_, nullptr)); // ends the operations that use registered memory
  unregisterIf([](const Region &) { return true; });
  if (context_)
    ucp_cleanup(std::exchange(context_, nullptr));
}

Status Worker::handle(unsigned id, ucp_am_recv_callback_t callback, void *argument) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = callback;
  handler.arg = argument;
  return checked(ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
}

Status Worker::appendAddress(std::string &text) const {
  ucp_address_t *address = nullptr;
  size_t bytes = 0;
  if (Status status = checked(ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
      !status.ok())
    return status;
  text.append(reinterpret_cast<const char *>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return {};
}

ucs_status_t Worker::connect(const char *address, const ucp_err_handler_t &handler, ucp_ep_h *connection) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = handler;
  const ucs_status_t status = ucp_ep_create(worker_, &params, connection);
  if (status == UCS_OK)
    connections_.push_back(*connection);
  else
    *connection = nullptr;
  return status;
}

void Worker::disconnect(ucp_ep_h connection, bool nothingWaits) {
  std::erase(connections_, connection);
  const ucp_request_param_t param{};
  void *const flush = nothingWaits ? nullptr : ucp_ep_flush_nbx(connection, &param);
  if (UCS_PTR_IS_PTR(flush))
    closing_.push_back({connection, flush});
  else
    disconnectAtOnce(connection);
}

void Worker::disconnectAtOnce(ucp_ep_h connection) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE; // then there is no request
  (void)ucp_ep_close_nbx(connection, &param);
}

void Worker::progress() {
  ucp_worker_progress(worker_);
  std::erase_if(closing_, [](const Closing &each) {
    const bool flushed = ucp_request_check_status(each.flush) != UCS_INPROGRESS;
    if (flushed) {
      ucp_request_free(each.flush);
      disconnectAtOnce(each.connection);
    }
    return flushed;
  });
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

void Worker::unregisterMemory(std::byte *data) {
  unregisterIf([&](const Region &region) { return region.begin == data; });
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

} // namespace reshard::ucx
