// SPDX-License-Identifier: Apache-2.0
// What the channel and the messenger of libreshard_ucx.so share: a UCX context with a worker, and registered memory.
#pragma once

#include "base/status.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::ucx {

/// Success, or an error that names the function of UCX.
Status checked(ucs_status_t status, const char *call);

struct Region {
  std::byte *begin, *end;
  ucp_mem_h handle;
  bool host; // not the memory of a GPU
};

/// A context and its worker, with the memory that is registered in it.
class Worker {
public:
  Worker() = default;
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  ~Worker() { close(); }

  /// `peers`: how many connections are expected. `features`: UCP_FEATURE_…
  Status open(size_t peers, uint64_t features);
  /// Frees all, and closes the connections at once. Operations that have not ended are over: nothing accesses their
  /// memory later.
  void close();
  bool isOpen() const { return worker_ != nullptr; }
  operator ucp_worker_h() const { return worker_; }

  Status handle(unsigned id, ucp_am_recv_callback_t callback, void *argument);
  /// Appends the worker's address, by which others connect.
  Status appendAddress(std::string &text) const;
  /// Begins a connection; `address` is that of the peer's worker.
  ucs_status_t connect(const char *address, const ucp_err_handler_t &handler, ucp_ep_h *connection);
  /// Closes a connection: at once if it is broken, or if UCX holds no unsent data of it (`nothingWaits`); else
  /// progress() closes it when the peer has received all. A peer that makes no progress keeps the connection open.
  void disconnect(ucp_ep_h connection, bool nothingWaits = false);
  /// Whether connections wait to be closed by progress().
  bool disconnects() const { return !closing_.empty(); }
  /// Lets UCX send, receive and call back; then closes connections.
  void progress();

  Status registerMemory(std::byte *data, uint64_t bytes);
  void unregisterMemory(std::byte *data);
  /// Unregisters each region for which `useless` returns true. No operation is in flight on its memory.
  void unregisterIf(const std::function<bool(const Region &)> &useless);
  /// Registered memory with these bytes; null if there is none.
  const Region *regionOf(const std::byte *data, uint64_t bytes) const;

private:
  /// A connection that is closed when the request `flush` has ended.
  struct Closing {
    ucp_ep_h connection;
    void *flush;
  };

  /// Closes a connection at once. If not all is sent, UCX must make no progress afterwards, because it may crash. When
  /// the peer closes, too, UCX can find two events of the socket at one time: the end of the peer's connection, and
  /// space for unsent data. It handles the end first, which frees the connection, and then uses the freed connection
  /// for the space (uct_tcp_iface_handle_events, UCX 1.13 to 1.22).
  static void disconnectAtOnce(ucp_ep_h connection);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<ucp_ep_h> connections_; // without those of closing_
  std::vector<Closing> closing_;
  std::vector<Region> regions_; // sorted, without overlaps
};

} // namespace reshard::ucx
