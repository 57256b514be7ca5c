// SPDX-License-Identifier: Apache-2.0
// The service thread: polls the messenger and answers frames. Other threads change what is served under the same mutex.
#include "executor/pull/server.h"

#include "executor/rendezvous/bytes.h"

#include <algorithm>
#include <utility>

namespace reshard::pull {

namespace {

constexpr std::chrono::milliseconds kMaintain{100};
/// The service thread handles a change at once, unless the process is out of memory or in a debugger.
constexpr std::chrono::seconds kChange{30};

} // namespace

// ------------------------------------------------------------------------------------------------------ the thread

void ServiceThread::start(std::function<bool()> work, std::function<void()> idle) {
  thread_ = std::thread([this, work = std::move(work), idle = std::move(idle)] { loop(work, idle); });
}

void ServiceThread::stop() {
  {
    const std::unique_lock lock = locked();
    stop_ = true;
  }
  if (thread_.joinable())
    thread_.join();
}

std::unique_lock<std::mutex> ServiceThread::locked() {
  contended_ = true;
  std::unique_lock lock(mutex_);
  contended_ = false;
  return lock;
}

void ServiceThread::loop(const std::function<bool()> &work, const std::function<void()> &idle) {
  constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
  std::chrono::microseconds pause = kShortest;
  Clock::time_point idled = Clock::now();
  while (true) {
    bool any = false;
    try {
      const std::lock_guard lock(mutex_);
      if (stop_)
        return;
      any = work();
    } catch (const std::bad_alloc &) { // what is due stays due; clients ask again for what was lost
    }
    worked_.notify_all();
    if (idle && Clock::now() - idled >= kMaintain) {
      idled = Clock::now();
      try {
        idle();
      } catch (const std::bad_alloc &) { // the next call handles what is left
      }
    }
    while (contended_.load(std::memory_order_relaxed))
      std::this_thread::yield();
    if (any)
      pause = kShortest;
    else
      std::this_thread::sleep_for(pause);
    if (!any)
      pause = std::min(pause * 2, kLongest);
  }
}

// ------------------------------------------------------------------------------------------- links between sources

void SourceLinks::add(const ServerAddress &process) {
  if (std::any_of(links_.begin(), links_.end(), [&](const Link &link) { return link.to.token == process.token; }))
    return;
  if (!options_.coordinates()) { // there is one coordinator
    for (const Link &link : links_)
      if (link.peer)
        messenger_.disconnect(*link.peer);
    links_.clear();
  }
  links_.push_back({process, {}, {}, kMaintain, {}});
}

void SourceLinks::remove(uint64_t token) {
  for (const Link &link : links_)
    if (link.to.token == token && link.peer)
      messenger_.disconnect(*link.peer);
  std::erase_if(links_, [&](const Link &link) { return link.to.token == token; });
}

bool SourceLinks::has(uint32_t peer) const {
  return std::any_of(links_.begin(), links_.end(), [&](const Link &link) { return link.peer == peer; });
}

void SourceLinks::ended(uint32_t peer) {
  for (Link &link : links_)
    if (link.peer == peer)
      link.peer.reset();
}

void SourceLinks::connect(Link &link) {
  link.retryAt = Clock::now() + link.pause;
  link.pause = std::min(2 * link.pause, 10 * kMaintain);
  const Result<uint32_t> peer = messenger_.connect(link.to.address);
  if (!peer.ok())
    return;
  link.peer = *peer;
  link.lastSent.reset();
  const bool sent = clients_.send(*peer, makeFrame(FrameKind::hello, {link.to.token, options_.worldRank, kProtocol}));
  if (sent && options_.coordinates())
    clients_.send(*peer, makeFrame(FrameKind::coordinator, {options_.token}), messenger_.address());
}

void SourceLinks::maintain(uint64_t version) {
  for (Link &link : links_) {
    if (!link.peer && Clock::now() >= link.retryAt)
      connect(link);
    if (!options_.coordinates() && link.peer && link.lastSent != version) {
      link.lastSent = version;
      clients_.send(*link.peer, makeFrame(FrameKind::published, {version, options_.token, options_.incarnation}));
    }
  }
}

// -------------------------------------------------------------------------------------------------- the coordinator

CoordinatorServer::CoordinatorServer(Clients &clients, SourceLinks &links, const ServerOptions &options)
    : clients_(clients), links_(links), options_(options),
      coordinator_({static_cast<uint32_t>(options.fleet.sources().size()), options.fleet.replicaRanks()}) {}

void CoordinatorServer::publish(uint64_t version) {
  if (published_ != version)
    coordinator_.published(0, {options_.incarnation, published_ = version});
}

void CoordinatorServer::lost(const Client &client) {
  coordinator_.lost(client.number);
  if (const std::optional<uint32_t> source = options_.fleet.sourceMeshRank(client.worldRank))
    if (const auto at = sourceClients_.find(*source); at != sourceClients_.end() && at->second == client.number) {
      sourceClients_.erase(at);
      coordinator_.published(*source, {});
    }
}

void CoordinatorServer::handle(uint32_t peer, const Client &client, const Frame &frame) {
  const Fleet &fleet = options_.fleet;
  const auto &words = frame.words;
  if (kindOf(frame) == FrameKind::list)
    return sendList(peer);
  if (const std::optional<uint32_t> source = fleet.sourceMeshRank(client.worldRank)) {
    if (kindOf(frame) == FrameKind::published && *source != 0) {
      sourceClients_[*source] = client.number;
      coordinator_.published(*source, {words[3], words[1]});
      links_.remove(words[2]); // it knows where the coordinator is
    }
    return;
  }
  const uint32_t replica = fleet.replicaOf(client.worldRank), meshRank = fleet.meshRankOf(client.worldRank);
  switch (kindOf(frame)) {
  case FrameKind::begin: {
    const auto wait = std::chrono::milliseconds(std::min<uint64_t>(words[4], 1'000'000'000));
    return coordinator_.begin(client.number, {replica, meshRank, words[1], words[2], words[3]}, Clock::now() + wait);
  }
  case FrameKind::complete:
    return coordinator_.complete(client.number, words[1]);
  case FrameKind::resume:
    return coordinator_.resume(client.number, replica, meshRank, words[1]);
  case FrameKind::parentFailed:
    if (words[1] < kMaxReplicas)
      coordinator_.parentFailed(client.number, static_cast<uint32_t>(words[1]));
    return;
  default:
    return;
  }
}

void CoordinatorServer::sendAnswers() {
  while (const std::optional<CoordinatorAnswer> answer = coordinator_.next()) {
    const std::optional<uint32_t> peer = clients_.peerOf(answer->client);
    if (!peer)
      continue;
    Frame frame;
    switch (answer->kind) {
    case CoordinatorAnswer::kAssign:
      frame = makeFrame(FrameKind::assign, {answer->assignment, answer->version.number, answer->parent, answer->call,
                                            answer->version.incarnation});
      break;
    case CoordinatorAnswer::kWaiting:
      frame = makeFrame(FrameKind::waiting, {answer->version.number, answer->rank});
      break;
    case CoordinatorAnswer::kCommitted:
      frame = makeFrame(FrameKind::committed, {answer->assignment, answer->version.number});
      break;
    case CoordinatorAnswer::kRepeat:
      frame = makeFrame(FrameKind::repeat, {answer->assignment});
      break;
    case CoordinatorAnswer::kReplaced:
      frame = makeFrame(FrameKind::replaced);
      break;
    }
    clients_.send(*peer, frame);
  }
}

void CoordinatorServer::sendList(uint32_t peer) {
  const std::vector<ReplicaInfo> all = coordinator_.replicas(Clock::now());
  for (size_t first = 0; first == 0 || first < all.size(); first += kListed) {
    ByteWriter writer;
    for (size_t i = first; i < std::min(all.size(), first + kListed); ++i)
      writer.number(all[i].replica)
          .number(all[i].ranks)
          .number(all[i].version)
          .number(static_cast<uint8_t>(all[i].state));
    if (!clients_.send(peer, makeFrame(FrameKind::listed, {all.size(), first}), writer.take()))
      return;
  }
}

// ------------------------------------------------------------------------------------------------------- the server

Server::Server(std::unique_ptr<Messenger> messenger, const MessageTable &table, PullProgress &progress,
               ServerOptions options)
    : messenger_(std::move(messenger)), options_(std::move(options)),
      clients_(*messenger_,
               [this](uint32_t peer, const Client *client) {
                 links_.ended(peer);
                 if (client && coordinator_)
                   coordinator_->lost(*client);
               }),
      ranges_(*messenger_, clients_, table, progress, options_), links_(*messenger_, clients_, options_) {
  if (options_.coordinates())
    coordinator_.emplace(clients_, links_, options_);
}

void Server::start() {
  thread_.start([this] { return progressOnce(); }, options_.idle);
}

/// Handles the next event and all work that is due; returns whether there was any.
bool Server::progressOnce() {
  bool any = change_.has_value();
  if (change_)
    ranges_.change(*change_);
  change_.reset();
  if (const std::optional<MessengerEvent> event = messenger_->poll()) {
    handleOrDrop(*event);
    any = true;
  }
  ranges_.serveParked();
  if (const Clock::time_point now = Clock::now(); now - maintained_ >= kMaintain) {
    maintained_ = now;
    if (coordinator_)
      coordinator_->expire(now);
  }
  if (coordinator_)
    coordinator_->publish(ranges_.available());
  links_.maintain(ranges_.available());
  if (coordinator_)
    coordinator_->sendAnswers();
  return any;
}

/// Closes the connection of an event that needs more memory than there is; the client connects again.
void Server::handleOrDrop(const MessengerEvent &event) {
  try {
    handle(event);
  } catch (const std::bad_alloc &) {
    clients_.drop(event.peer);
    throw;
  }
}

void Server::handle(const MessengerEvent &event) {
  if (event.kind == MessengerEvent::kArrived) {
    handleFrame(event.peer, event);
  } else if (event.kind == MessengerEvent::kLost) {
    clients_.forget(event.peer);
  } else if (event.kind == MessengerEvent::kSent) {
    if (Client *const client = clients_.find(event.peer))
      ranges_.sent(event.peer, *client, event.token);
  }
}

void Server::handleFrame(uint32_t peer, const MessengerEvent &event) {
  const Frame &frame = event.frame;
  if (links_.has(peer))
    return; // welcome
  Client *const client = clients_.find(peer);
  if (!client)
    return handshake(peer, frame);
  if (coordinator_)
    coordinator_->seen(*client);
  if (kindOf(frame) == FrameKind::ping) {
    clients_.send(peer, makeFrame(FrameKind::pong));
  } else if (kindOf(frame) == FrameKind::coordinator) {
    const bool fromThere = client->worldRank == options_.fleet.sources()[0];
    if (options_.isSource() && !coordinator_ && fromThere && frame.words[1] != 0 && !event.text.empty())
      links_.add({frame.words[1], event.text});
  } else if (kindOf(frame) == FrameKind::askDigests) {
    sendDigests(peer, event);
  } else if (!ranges_.handle(peer, *client, frame) && coordinator_) {
    coordinator_->handle(peer, *client, frame);
  }
}

/// The first frame of a connection.
void Server::handshake(uint32_t peer, const Frame &frame) {
  const Fleet &fleet = options_.fleet;
  const uint64_t rank = frame.words[2];
  const bool known = rank <= UINT32_MAX &&
                     (fleet.isTarget(static_cast<uint32_t>(rank)) || fleet.sourceMeshRank(static_cast<uint32_t>(rank)));
  if (kindOf(frame) != FrameKind::hello || frame.words[1] != options_.token || !known || frame.words[3] != kProtocol)
    return messenger_->disconnect(peer);
  clients_.add(peer, static_cast<uint32_t>(rank));
  clients_.send(peer, makeFrame(FrameKind::welcome, {options_.token}));
}

/// Answers with the partial digests of the buckets that a frame asks for. They were taken when the version was
/// published, so the memory may have changed meanwhile.
void Server::sendDigests(uint32_t peer, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  if (event.text.size() > kDigests * sizeof(uint32_t))
    return;
  DigestsAnswer answer = digests_.empty() ? DigestsAnswer::without : DigestsAnswer::given;
  if (words[1] == 0 || words[1] != last_ || words[2] < options_.incarnation)
    answer = DigestsAnswer::otherVersion;
  ByteWriter partials;
  for (ByteReader buckets(event.text); answer == DigestsAnswer::given && !buckets.rest().empty();) {
    const auto bucket = buckets.number<uint32_t>();
    if (!buckets.ok() || bucket >= digests_.size())
      return; // not a request of a rank with this plan
    const CountedDigest &partial = digests_[bucket];
    partials.number(partial.digest.sums[0]).number(partial.digest.sums[1]).number(partial.elements);
  }
  clients_.send(peer, makeFrame(FrameKind::digests, {words[1], words[2], words[3], static_cast<uint64_t>(answer)}),
                partials.take());
}

void Server::addPeer(const ServerAddress &process) {
  const std::unique_lock lock = thread_.locked();
  links_.add(process);
}

Status Server::mayPublish(uint64_t version) {
  const std::unique_lock lock = thread_.locked();
  if (ranges_.version().number != 0)
    return invalid("version " + std::to_string(ranges_.version().number) + " is published already; release it first");
  if (version <= last_)
    return invalid("found version " + std::to_string(version) + ", expected more than " + std::to_string(last_) +
                   (last_ > 0 ? ", the version that was published last" : ""));
  return {};
}

Status Server::publish(uint64_t version, std::vector<CountedDigest> digests) {
  if (Status status = mayPublish(version); !status.ok())
    return status;
  const std::unique_lock lock = thread_.locked();
  last_ = version;
  ranges_.publish(version);
  digests_ = std::move(digests);
  return {};
}

size_t Server::leases() {
  const std::unique_lock lock = thread_.locked();
  return ranges_.leases();
}

/// Serves another version, after all leases have ended.
Status Server::change(std::unique_lock<std::mutex> &lock, const Version &version) {
  change_ = version;
  if (thread_.wait(lock, kChange, [&] { return !change_; }))
    return {};
  return failed("the thread that serves this rank's memory has not run for " + std::to_string(kChange.count()) +
                " s; other processes may still read the memory");
}

Status Server::release(const Deadline &deadline) {
  std::unique_lock lock = thread_.locked();
  const uint64_t version = ranges_.version().number;
  if (version == 0)
    return invalid("no version is published");
  ranges_.setWithdrawing(true);
  const auto unread = [&] { return ranges_.leases() == 0; };
  while (!unread() && !passed(deadline))
    thread_.wait(lock, std::chrono::milliseconds(10), unread);
  const std::string names = ranges_.leaseHolders();
  if (Status status = change(lock, {}); !status.ok())
    return status;
  ranges_.setWithdrawing(false);
  if (names.empty())
    return {};
  return timedOut("timed out: version " + std::to_string(version) + " was still read by " + names +
                  "; their leases are revoked");
}

Status Server::serve(const Version &version) {
  std::unique_lock lock = thread_.locked();
  return ranges_.version() == version ? Status() : change(lock, version);
}

void Server::setPulling(bool pulling) {
  const std::unique_lock lock = thread_.locked();
  ranges_.setPulling(pulling);
}

} // namespace reshard::pull
