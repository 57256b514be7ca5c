// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: the messages of a channel.

#include "executor/backends/ucx_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace reshard::ucx {
namespace {

/// The most messages of one peer that wait for their receive: kWindow, and one for each request of the peer. More are
/// an error.
constexpr size_t kMaxArrivals = size_t{1} << 16;
/// Bytes that are read out of a sender's memory before UCX makes progress again.
constexpr uint64_t kReadBytes = 1 << 20;
/// The time between two probes of a peer. TCP accepts the first one after the peer has ended; a later one fails.
constexpr std::chrono::milliseconds kProbeInterval{200};

} // namespace

void UcxChannel::describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) const {
  if (const Region *region = bytes > kEagerBytes ? worker_.regionOf(data, bytes) : nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = region->handle;
  }
}

Status UcxChannel::begin(size_t request, const Request &message) {
  if (!worker_.isOpen())
    return invalid("the channel is closed: a run has failed");
  if (message.peer >= size() || message.tag > maxTag() || message.bytes > kMaxChannelBytes)
    return invalid("a message of " + std::to_string(message.bytes) + " bytes with tag " + std::to_string(message.tag) +
                   " for rank " + std::to_string(message.peer) + ", expected at most " +
                   std::to_string(kMaxChannelBytes) + " bytes, a tag of at most " + std::to_string(maxTag()) +
                   " and a rank below " + std::to_string(size()));
  // A message that has arrived is received, even if its sender has ended since.
  if (Status status = connect(message.peer); !status.ok() && (message.sends || !arrivalFor(message)))
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
  mine.notice.header = {rendezvous_->session(), to.sent++, bytes, reinterpret_cast<uint64_t>(data), rank(), tag};
  const Region *region = bytes > kEagerBytes && to.readsOurs ? worker_.regionOf(data, bytes) : nullptr;
  if (region && region->host) {
    mine.state = Request::kIsRead;
    notify(mine.notice, kReadMe, peer, mine.notice.header.number);
    return {};
  }
  mine.notice.header.address = 0;
  const bool eager = bytes <= kEagerBytes && to.eagerSent - to.eagerTaken < kWindow;
  to.eagerSent += eager;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = eager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  describe(param, data, bytes);
  const bool nothing = !eager && bytes == 0;
  void *const handle = ucp_am_send_nbx(to.connection, kMessage, &mine.notice.header, sizeof(Header),
                                       nothing ? &nothing_ : data, nothing ? 1 : bytes, &param);
  if (UCS_PTR_IS_ERR(handle)) {
    lose(peer, UCS_PTR_STATUS(handle));
    return report(peer);
  }
  mine.notice.request = handle;
  mine.state = handle ? Request::kMoves : Request::kDone;
  return {};
}

Status UcxChannel::receive(size_t request, uint32_t peer, uint32_t tag, std::byte *data, uint64_t bytes) {
  Request message;
  message.state = Request::kWaits;
  message.peer = peer;
  message.tag = tag;
  message.data = data;
  message.bytes = bytes;
  if (Status status = begin(request, message); !status.ok())
    return status;
  Peer &from = peers_[peer];
  const Arrival *arrival = arrivalFor(message);
  if (!arrival) {
    from.receives.push_back(request);
    return {};
  }
  const Arrival found = *arrival;
  from.arrivals.erase(from.arrivals.begin() + (arrival - from.arrivals.data()));
  take(request, found);
  return {};
}

const Arrival *UcxChannel::arrivalFor(const Request &receive) const {
  const Peer &from = peers_[receive.peer];
  // Arrivals below `admitted` have no receive yet, and lie in the order of their numbers.
  const auto arrival = std::find_if(from.arrivals.begin(), from.arrivals.end(), [&](const Arrival &each) {
    return each.header.tag == receive.tag && each.header.number < from.admitted;
  });
  return arrival == from.arrivals.end() ? nullptr : &*arrival;
}

void UcxChannel::take(size_t number, const Arrival &arrival) {
  Request &request = requests_[number];
  Peer &peer = peers_[request.peer];
  request.state = Request::kMoves;
  if (arrival.header.bytes != request.bytes) {
    request.error = failed("received a message of " + std::to_string(arrival.header.bytes) + " bytes from rank " +
                           std::to_string(request.peer) + ", expected " + std::to_string(request.bytes));
    if (arrival.descriptor)
      ucp_am_data_release(worker_, arrival.descriptor);
  } else if (arrival.id == kReadMe) {
    request.state = Request::kReads;
    request.from = arrival.header.address;
    request.notice.header.number = arrival.header.number;
    reading_.push_back(number);
  } else if (arrival.descriptor) {
    ucp_request_param_t param{};
    describe(param, request.data, request.bytes);
    const bool nothing = request.bytes == 0;
    void *const handle = ucp_am_recv_data_nbx(worker_, arrival.descriptor, nothing ? &nothing_ : request.data,
                                              nothing ? 1 : request.bytes, &param);
    if (UCS_PTR_IS_ERR(handle)) {
      lose(request.peer, UCS_PTR_STATUS(handle));
      request.state = Request::kFails;
    } else {
      request.notice.request = handle;
      if (handle == nullptr)
        request.state = Request::kDone;
    }
  } else {
    if (request.bytes > 0)
      std::memcpy(request.data, peer.inbox->memory[arrival.place], request.bytes);
    request.state = Request::kDone;
  }
  if (!arrival.eager())
    return;
  peer.inbox->used[arrival.place] = false;
  if (++peer.taken - peer.credit.header.number >= kWindow / 2)
    notify(peer.credit, kCredit, request.peer, peer.taken); // if one is being sent, a later one includes this
}

void UcxChannel::readPart(size_t number) {
  Request &request = requests_[number];
  const uint64_t bytes = std::min(kReadBytes, request.bytes - request.read);
  const bool read = peers_[request.peer].memory.read(request.data + request.read, request.from + request.read, bytes);
  request.read += bytes;
  if (read && request.read < request.bytes)
    return;
  reading_.erase(reading_.begin());
  request.state = read ? Request::kMoves : Request::kFails;
  if (read) {
    notify(request.notice, kRead, request.peer, request.notice.header.number);
    return;
  }
  // Before it ended, the peer may have sent which rank failed first.
  for (int more = 0; more < kMoreProgress && !peers_[request.peer].loss; ++more)
    worker_.progress();
  lose(request.peer,
       "the memory of rank " + std::to_string(request.peer) + " cannot be read; see whether that process has ended");
}

bool UcxChannel::notify(Notice &notice, Id id, uint32_t rank, uint64_t number, std::string_view text) {
  if (notice.request && ucp_request_check_status(notice.request) == UCS_INPROGRESS)
    return false;
  if (notice.request)
    ucp_request_free(std::exchange(notice.request, nullptr));
  if (peers_[rank].loss)
    return true;
  notice.header.session = rendezvous_->session();
  notice.header.number = number;
  notice.header.rank = this->rank();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  void *const handle = ucp_am_send_nbx(peers_[rank].connection, id, &notice.header, sizeof notice.header, text.data(),
                                       text.size(), &param);
  if (!UCS_PTR_IS_ERR(handle))
    notice.request = handle;
  else
    lose(rank, UCS_PTR_STATUS(handle));
  return true;
}

void UcxChannel::admit(uint32_t rank) {
  Peer &peer = peers_[rank];
  peer.fresh = false;
  // UCX may pass on messages of different lengths in another order than they were sent.
  for (size_t a = 0; a < peer.arrivals.size();) {
    if (peer.arrivals[a].header.number != peer.admitted) {
      ++a;
      continue;
    }
    const Arrival arrival = peer.arrivals[a];
    const auto at = peer.arrivals.begin() + static_cast<ptrdiff_t>(a);
    const auto receive = std::find_if(peer.receives.begin(), peer.receives.end(),
                                      [&](size_t request) { return requests_[request].tag == arrival.header.tag; });
    if (receive == peer.receives.end()) {
      // Admitted arrivals lie in front.
      const auto end = std::find_if(peer.arrivals.begin(), at,
                                    [&](const Arrival &each) { return each.header.number > peer.admitted; });
      std::rotate(end, at, at + 1);
    } else {
      const size_t request = *receive;
      peer.arrivals.erase(at);
      peer.receives.erase(receive);
      take(request, arrival);
    }
    ++peer.admitted;
    a = 0;
  }
}

void UcxChannel::progress() {
  worker_.progress();
  while (!fresh_.empty()) {
    const uint32_t rank = fresh_.back();
    fresh_.pop_back();
    admit(rank);
  }
  if (!reading_.empty())
    readPart(reading_.front());
}

Result<bool> UcxChannel::test(size_t number) {
  if (!worker_.isOpen())
    return invalid("the channel is closed: a run has failed");
  Request &request = requests_[number];
  if (request.state == Request::kDone)
    return true;
  progress();
  if (request.notice.request) {
    const ucs_status_t status = ucp_request_check_status(request.notice.request);
    if (status != UCS_INPROGRESS) {
      ucp_request_free(std::exchange(request.notice.request, nullptr));
      if (status != UCS_OK) {
        lose(request.peer, status);
        request.state = Request::kFails;
      }
    }
  }
  if (!request.error.ok())
    return request.error;
  if (request.state == Request::kMoves && !request.notice.request)
    request.state = Request::kDone;
  if (request.state == Request::kDone)
    return true;
  if (Status status = checkPeer(request.peer); !status.ok())
    return status;
  return false;
}

Status UcxChannel::check(uint32_t peer) {
  if (!worker_)
    return invalid("the channel is closed: a run has failed");
  if (Status status = connect(peer); !status.ok())
    return status;
  progress();
  return checkPeer(peer);
}

void UcxChannel::tellRun(uint32_t rank, uint64_t run) {
  ran_ = true;
  if (worker_.isOpen() && peers_[rank].connection)
    notify(peers_[rank].begins, kRun, rank, run); // if one is being sent, the peer has not received that either
}

Status UcxChannel::checkPeer(uint32_t rank) {
  Peer &peer = peers_[rank];
  if (const auto now = std::chrono::steady_clock::now(); !peer.loss && now - peer.probed >= kProbeInterval) {
    peer.probed = now;
    notify(peer.probe, kProbe, rank, 0);
  }
  return peer.loss ? report(rank) : Status();
}

void UcxChannel::lose(uint32_t rank, const std::string &reason) {
  if (!peers_[rank].loss)
    peers_[rank].loss = {rank, reason};
}

void UcxChannel::lose(uint32_t rank, ucs_status_t status) {
  lose(rank, "the connection to rank " + std::to_string(rank) + " is lost: " + ucs_status_string(status) +
                 " (UCX); see whether that process has ended");
}

Status UcxChannel::report(uint32_t rank) {
  const Loss &loss = *peers_[rank].loss;
  if (!reported_)
    reported_ = loss;
  return failed(loss.reason + (loss.rank == rank ? ""
                                                 : "; rank " + std::to_string(rank) +
                                                       ", for which this rank waits, failed because of it"));
}

template <Id id>
ucs_status_t UcxChannel::onMessage(void *channel, const void *header, size_t headerBytes, void *data, size_t bytes,
                                   const ucp_am_recv_param_t *param) {
  UcxChannel &self = *static_cast<UcxChannel *>(channel);
  const bool announced = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const ucs_status_t drop = announced ? UCS_ERR_REJECTED : UCS_OK;
  Header own;
  if (headerBytes != sizeof own)
    return drop;
  std::memcpy(&own, header, sizeof own);
  if (own.session != self.rendezvous_->session() || own.rank >= self.size())
    return drop; // another job's message
  if (id == kMessage || id == kReadMe)
    return self.arrive({own, id, 0, announced ? data : nullptr}, data, bytes) ? UCS_INPROGRESS : drop;
  if (!announced)
    self.notified(id, own, {static_cast<const char *>(data), bytes});
  return drop;
}

template ucs_status_t UcxChannel::onMessage<kMessage>(void *, const void *, size_t, void *, size_t,
                                                      const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kReadMe>(void *, const void *, size_t, void *, size_t,
                                                     const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kRead>(void *, const void *, size_t, void *, size_t,
                                                   const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kReader>(void *, const void *, size_t, void *, size_t,
                                                     const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kCredit>(void *, const void *, size_t, void *, size_t,
                                                     const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kProbe>(void *, const void *, size_t, void *, size_t,
                                                    const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kLoss>(void *, const void *, size_t, void *, size_t,
                                                   const ucp_am_recv_param_t *);
template ucs_status_t UcxChannel::onMessage<kRun>(void *, const void *, size_t, void *, size_t,
                                                  const ucp_am_recv_param_t *);

bool UcxChannel::arrive(Arrival arrival, const void *data, size_t bytes) {
  const Header &header = arrival.header;
  Peer &peer = peers_[header.rank];
  bool valid = header.number >= peer.admitted && header.bytes <= kMaxChannelBytes &&
               peer.arrivals.size() < kMaxArrivals &&
               std::none_of(
                   peer.arrivals.begin(), peer.arrivals.end(),
                   [&](const Arrival &each) { return each.header.number == header.number; });
  if (arrival.id == kReadMe) {
    valid = valid && peer.memory.isOpen() && bytes == 0 && !arrival.descriptor;
  } else if (arrival.descriptor) {
    valid = valid && bytes == std::max<uint64_t>(header.bytes, 1);
  } else {
    if (!peer.inbox)
      peer.inbox = std::make_unique<Inbox>();
    bool(&used)[kWindow] = peer.inbox->used;
    arrival.place = static_cast<size_t>(std::find(std::begin(used), std::end(used), false) - std::begin(used));
    valid = valid && arrival.place < kWindow && bytes == header.bytes && bytes <= kEagerBytes;
    if (valid)
      used[arrival.place] = true;
    if (valid && bytes > 0)
      std::memcpy(peer.inbox->memory[arrival.place], data, bytes);
  }
  if (!valid) {
    lose(header.rank, "rank " + std::to_string(header.rank) + " sent a message that breaks the protocol: number " +
                          std::to_string(header.number) + " after " + std::to_string(peer.admitted) + ", " +
                          std::to_string(header.bytes) + " bytes, found " + std::to_string(bytes));
    return false;
  }
  peer.arrivals.push_back(arrival);
  if (!std::exchange(peer.fresh, true))
    fresh_.push_back(header.rank);
  return arrival.descriptor != nullptr;
}

void UcxChannel::notified(Id id, const Header &header, std::string_view text) {
  Peer &peer = peers_[header.rank];
  if (id == kReader) {
    peer.readsOurs = true;
  } else if (id == kCredit) {
    if (header.number <= peer.eagerSent) // credits may arrive in another order than they were sent
      peer.eagerTaken = std::max(peer.eagerTaken, header.number);
  } else if (id == kRead) {
    for (Request &request : requests_)
      if (request.state == Request::kIsRead && request.peer == header.rank &&
          request.notice.header.number == header.number)
        request.state = Request::kMoves;
  } else if (id == kRun) {
    peer.run = std::max(peer.run, header.number);
  } else if (id == kLoss && header.number < size()) {
    peer.loss = Loss{static_cast<uint32_t>(header.number), std::string(text)};
  }
}

} // namespace reshard::ucx
