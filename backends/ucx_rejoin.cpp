// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: a channel leaves the processes of one rendezvous and joins those of another. Context, worker,
// registered memory and connections stay. A process has the same hello in both, as long as its worker is open, so the
// hello identifies the connection to it.
//
// Messages between the two rendezvous cannot be confused: the header of each has the session of its rendezvous. A peer
// that has joined sends at once. So this process progresses its worker before it joins and after it has taken over the
// new session, but not in between, where messages of the new session would be dropped.

#include "backends/ucx_channel.h"
#include "support/backoff.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace reshard::ucx {
namespace {

/// The most seconds to wait for headers that are being sent, and for connections that are being closed.
constexpr double kSettleSeconds = 1;

/// Frees the request of a notice if it is complete. Returns whether nothing is being sent.
bool idle(Notice &notice) {
  if (notice.request && ucp_request_check_status(notice.request) == UCS_INPROGRESS)
    return false;
  if (notice.request)
    ucp_request_free(std::exchange(notice.request, nullptr));
  return true;
}

bool idle(Peer &peer) {
  bool all = true;
  for (Notice *notice : {&peer.reader, &peer.credit, &peer.probe, &peer.farewell})
    all = idle(*notice) && all;
  return all;
}

} // namespace

void UcxChannel::settle() {
  if (!worker_.isOpen())
    return;
  for (int more = 0; more < kMoreProgress; ++more) // UCX reports lost connections
    ucp_worker_progress(worker_);
  std::erase_if(ended_, [](std::vector<Peer> &peers) {
    return std::all_of(peers.begin(), peers.end(), [](Peer &peer) { return idle(peer); });
  });
  const Deadline deadline = deadlineIn(kSettleSeconds);
  Backoff backoff;
  while (!std::all_of(peers_.begin(), peers_.end(), [](Peer &peer) { return idle(peer) || peer.loss; }) &&
         !passed(deadline)) {
    ucp_worker_progress(worker_);
    backoff.wait();
  }
}

Status UcxChannel::rejoin(Rendezvous &rendezvous, const Deadline &deadline) {
  const bool anew = !worker_.isOpen();
  settle();
  closeFormer(deadlineIn(kSettleSeconds));
  Rendezvous *const before = std::exchange(rendezvous_, &rendezvous);
  if (Status status = join(deadline); !status.ok()) {
    rendezvous_ = before;
    if (anew)
      close(true, deadlineIn(kSettleSeconds));
    return status;
  }
  // UCX may read the headers of the old peers until they are sent or purged, so these peers stay in place.
  std::vector<Peer> old = std::exchange(peers_, std::vector<Peer>(rendezvous.size()));
  fresh_.clear();
  fresh_.reserve(peers_.size());
  reading_.clear();
  reported_.reset();
  std::vector<ucp_ep_h> useless;
  for (Peer &peer : old) {
    for (const Arrival &arrival : peer.arrivals)
      if (arrival.descriptor)
        ucp_am_data_release(worker_, arrival.descriptor);
    if (peer.connection && idle(peer) && !peer.loss)
      former_[peer.hello] = {peer.connection, false};
    else if (peer.connection)
      useless.push_back(peer.connection);
  }
  closeAtOnce(useless, deadlineIn(kSettleSeconds));
  if (!std::all_of(old.begin(), old.end(), [](Peer &peer) { return idle(peer); }))
    ended_.push_back(std::move(old));
  return {};
}

ucp_ep_h UcxChannel::formerConnection(const std::string &hello) {
  const auto former = former_.find(hello);
  if (former == former_.end() || former->second.lost)
    return nullptr;
  const ucp_ep_h connection = former->second.connection;
  former_.erase(former);
  return connection;
}

void UcxChannel::closeFormer(const Deadline &deadline) {
  std::vector<ucp_ep_h> connections;
  connections.reserve(former_.size());
  for (const auto &[hello, former] : former_)
    connections.push_back(former.connection);
  former_.clear();
  closeAtOnce(connections, deadline);
}

void UcxChannel::closeAtOnce(const std::vector<ucp_ep_h> &connections, const Deadline &deadline) {
  if (connections.empty()) // the worker may be closed
    return;
  std::vector<void *> handles;
  for (const ucp_ep_h connection : connections)
    if (void *const handle = Worker::disconnect(connection, true))
      handles.push_back(handle);
  const auto closed = [](void *handle) { return ucp_request_check_status(handle) != UCS_INPROGRESS; };
  Backoff backoff;
  while (!std::all_of(handles.begin(), handles.end(), closed) && !passed(deadline)) {
    ucp_worker_progress(worker_);
    backoff.wait();
  }
  for (int more = 0; more < kMoreProgress; ++more) // UCX purges what a closed connection had not sent
    ucp_worker_progress(worker_);
  for (void *handle : handles)
    ucp_request_free(handle);
}

} // namespace reshard::ucx
