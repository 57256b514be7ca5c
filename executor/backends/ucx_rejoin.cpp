// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: a channel leaves the processes of one rendezvous and joins the processes of another. Context,
// worker, registered memory and connections stay. A process has the same hello in both, as long as its worker is open,
// so the hello identifies the connection to it.
//
// Messages between the two rendezvous cannot be confused: the header of each has the session of its rendezvous. A peer
// that has joined sends at once. So this process progresses its worker before it joins and after it has taken over the
// new session, but not in between, where messages of the new session would be dropped.

#include "base/backoff.h"
#include "executor/backends/ucx_channel.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace reshard::ucx {
namespace {

/// The most seconds to wait for headers that are being sent.
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
  for (Notice *notice : peer.notices())
    all = idle(*notice) && all;
  return all;
}

} // namespace

void UcxChannel::settle() {
  if (!worker_.isOpen())
    return;
  for (int more = 0; more < kMoreProgress; ++more) // UCX reports lost connections
    worker_.progress();
  std::erase_if(ended_, [](std::vector<Peer> &peers) {
    return std::all_of(peers.begin(), peers.end(), [](Peer &peer) { return idle(peer); });
  });
  const Deadline deadline = deadlineIn(kSettleSeconds, interrupt_);
  Backoff backoff;
  while (!std::all_of(peers_.begin(), peers_.end(), [](Peer &peer) { return idle(peer) || peer.loss; }) &&
         !passed(deadline)) {
    worker_.progress();
    backoff.wait();
  }
}

Status UcxChannel::rejoin(Rendezvous &rendezvous, const Deadline &deadline) {
  const bool anew = !worker_.isOpen();
  settle();
  closeFormer();
  Rendezvous *const before = std::exchange(rendezvous_, &rendezvous);
  if (Status status = join(deadline); !status.ok()) {
    rendezvous_ = before;
    if (anew)
      close(true);
    return status;
  }
  // UCX may read the headers of the old peers until they are sent or purged, so these peers stay in place.
  std::vector<Peer> old = std::exchange(peers_, std::vector<Peer>(rendezvous.size()));
  fresh_.clear();
  fresh_.reserve(peers_.size());
  reading_.clear();
  reported_.reset();
  ran_ = false;
  for (Peer &peer : old) {
    dropArrivals(peer);
    if (peer.connection && idle(peer) && !peer.loss)
      former_[peer.hello] = {peer.connection, false};
    else if (peer.connection)
      worker_.disconnect(peer.connection);
  }
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

void UcxChannel::closeFormer() {
  for (const auto &[hello, former] : std::exchange(former_, {}))
    worker_.disconnect(former.connection);
}

} // namespace reshard::ucx
