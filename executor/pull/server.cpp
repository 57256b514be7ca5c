// SPDX-License-Identifier: Apache-2.0
// The service thread: polls the messenger, answers frames, packs the ranges that clients fetch, and ends all leases
// before the memory changes. Other threads change what is served under the same mutex.
#include "executor/pull/server.h"

#include "executor/rendezvous/bytes.h"

#include <algorithm>
#include <cstdio>
#include <sys/mman.h>

namespace reshard::pull {

namespace {

constexpr std::chrono::milliseconds kMaintain{100};
/// The service thread handles a change at once, unless the process is out of memory or in a debugger.
constexpr std::chrono::seconds kChange{30};

} // namespace

Server::Server(std::unique_ptr<Messenger> messenger, const MessageTable &table, PullProgress &progress,
               ServerOptions options)
    : messenger_(std::move(messenger)), table_(table), progress_(progress), options_(std::move(options)),
      address_(messenger_->address()),
      incarnation_(static_cast<uint64_t>(
          std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count())) {
  if (coordinates())
    coordinator_.emplace(
        FleetShape{static_cast<uint32_t>(options_.fleet.sources().size()), options_.fleet.replicaRanks()});
}

void Server::stop() {
  {
    const std::unique_lock lock = locked();
    stop_ = true;
  }
  if (thread_.joinable())
    thread_.join();
}

void Server::start() {
  thread_ = std::thread([this] { loop(); });
}

void Server::loop() {
  constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
  std::chrono::microseconds pause = kShortest;
  Clock::time_point idle = Clock::now();
  while (true) {
    bool any = false;
    try {
      const std::lock_guard lock(mutex_);
      if (stop_)
        return;
      any = progressOnce();
    } catch (const std::bad_alloc &) { // what is due stays due; clients ask again for what was lost
    }
    changed_.notify_all();
    if (options_.idle && Clock::now() - idle >= kMaintain) {
      idle = Clock::now();
      try {
        options_.idle();
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

/// Handles the next event and all work that is due; returns whether there was any.
bool Server::progressOnce() {
  bool any = change_.has_value();
  if (change_) {
    endLeases();
    progress_.reset();
    version_ = *std::exchange(change_, {});
  }
  if (const std::optional<MessengerEvent> event = messenger_->poll()) {
    handleOrDrop(*event);
    any = true;
  }
  serveParked();
  if (const Clock::time_point now = Clock::now(); now - maintained_ >= kMaintain) {
    maintained_ = now;
    if (coordinator_)
      coordinator_->expire(now);
  }
  maintainLinks();
  sendAnswers();
  return any;
}

/// Closes the connection of an event that needs more memory than there is; the client connects again.
void Server::handleOrDrop(const MessengerEvent &event) {
  try {
    handle(event);
  } catch (const std::bad_alloc &) {
    messenger_->disconnect(event.peer);
    forget(event.peer);
    throw;
  }
}

void Server::handle(const MessengerEvent &event) {
  const uint32_t peer = event.peer;
  if (event.kind == MessengerEvent::kArrived) {
    handleFrame(peer, event);
  } else if (event.kind == MessengerEvent::kLost) {
    for (Link &link : links_)
      if (link.peer == peer) {
        link.peer.reset();
        link.lastSent.reset();
      }
    forget(peer);
  } else if (event.kind == MessengerEvent::kSent) {
    const auto client = clients_.find(peer);
    if (client != clients_.end() && event.token < kWindow) {
      Slot &slot = client->second.slots[event.token];
      slot.sending = false;
      if (const std::optional<Fetch> parked = std::exchange(slot.parked, {}))
        fetch(peer, client->second, *parked);
    }
  }
}

void Server::handleFrame(uint32_t peer, const MessengerEvent &event) {
  const Frame &frame = event.frame;
  if (std::any_of(links_.begin(), links_.end(), [&](const Link &link) { return link.peer == peer; }))
    return; // welcome
  const auto found = clients_.find(peer);
  if (found == clients_.end())
    return handshake(peer, frame);
  Client &client = found->second;
  if (coordinator_)
    coordinator_->seen(client.number, Clock::now());
  if (kindOf(frame) == FrameKind::ping) {
    send(peer, makeFrame(FrameKind::pong));
    return;
  }
  if (kindOf(frame) == FrameKind::coordinator) {
    const bool fromThere = client.worldRank == options_.fleet.sources()[0];
    if (isSource() && !coordinates() && fromThere && frame.words[1] != 0 && !event.text.empty())
      linkTo({frame.words[1], event.text});
    return;
  }
  if (kindOf(frame) == FrameKind::askDigests)
    return sendDigests(peer, event);
  if (!handleReader(peer, client, frame) && coordinator_)
    handleMember(peer, client, frame);
}

/// The first frame of a connection.
void Server::handshake(uint32_t peer, const Frame &frame) {
  const Fleet &fleet = options_.fleet;
  const uint64_t rank = frame.words[2];
  const bool known = rank <= UINT32_MAX &&
                     (fleet.isTarget(static_cast<uint32_t>(rank)) || fleet.sourceMeshRank(static_cast<uint32_t>(rank)));
  if (kindOf(frame) != FrameKind::hello || frame.words[1] != options_.token || !known || frame.words[3] != kProtocol)
    return messenger_->disconnect(peer);
  Client &client = clients_[peer];
  client.number = ++numbers_;
  client.worldRank = static_cast<uint32_t>(rank);
  byNumber_[client.number] = peer;
  send(peer, makeFrame(FrameKind::welcome, {options_.token}));
}

/// Handles the frames of ranks that read bytes; returns false for other frames.
bool Server::handleReader(uint32_t peer, Client &client, const Frame &frame) {
  const auto &words = frame.words;
  switch (kindOf(frame)) {
  case FrameKind::fetch: {
    if (words[5] >= kWindow || words[3] >= words[4] || words[4] - words[3] > kRangeBytes || words[1] == 0 ||
        words[2] > UINT32_MAX)
      return true;
    const Fetch asked{{words[7], words[1]}, words[2], words[3], words[4], static_cast<uint32_t>(words[5]),
                      words[6] != 0};
    Slot &slot = client.slots[asked.slot];
    if (slot.sending) // the client has received its data, but poll() has not returned kSent yet
      slot.parked = asked;
    else
      fetch(peer, client, asked);
    return true;
  }
  case FrameKind::confirm:
    send(peer, makeFrame(FrameKind::confirmed,
                         {words[1], words[1] == version_.number && words[2] == client.lease && client.lease != 0}));
    return true;
  case FrameKind::leave:
    client.lease = 0;
    for (Slot &slot : client.slots) {
      slot.parked.reset();
      if (!slot.sending)
        slot.memory.reset();
    }
    return true;
  default:
    return false;
  }
}

/// Answers with the partial digests of the buckets that a frame asks for. They were taken when the version was
/// published, so the memory may have changed meanwhile.
void Server::sendDigests(uint32_t peer, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  if (event.text.size() > kDigests * sizeof(uint32_t))
    return;
  DigestsAnswer answer = digests_.empty() ? DigestsAnswer::without : DigestsAnswer::given;
  if (words[1] == 0 || words[1] != last_ || words[2] < incarnation_)
    answer = DigestsAnswer::otherVersion;
  ByteWriter partials;
  for (ByteReader buckets(event.text); answer == DigestsAnswer::given && !buckets.rest().empty();) {
    const auto bucket = buckets.number<uint32_t>();
    if (!buckets.ok() || bucket >= digests_.size())
      return; // not a request of a rank with this plan
    const CountedDigest &partial = digests_[bucket];
    partials.number(partial.digest.sums[0]).number(partial.digest.sums[1]).number(partial.elements);
  }
  send(peer, makeFrame(FrameKind::digests, {words[1], words[2], words[3], static_cast<uint64_t>(answer)}),
       partials.take());
}

/// Handles requests to the coordinator; returns false for other frames.
bool Server::handleMember(uint32_t peer, Client &client, const Frame &frame) {
  const Fleet &fleet = options_.fleet;
  const auto &words = frame.words;
  if (const std::optional<uint32_t> source = fleet.sourceMeshRank(client.worldRank)) {
    if (kindOf(frame) == FrameKind::published && *source != 0) {
      sourceClients_[*source] = client.number;
      coordinator_->published(*source, {words[3], words[1]});
      for (Link &link : links_) // it knows where the coordinator is
        if (link.to.token == words[2] && link.peer)
          messenger_->disconnect(*link.peer);
      std::erase_if(links_, [&](const Link &link) { return link.to.token == words[2]; });
    } else if (kindOf(frame) == FrameKind::list) {
      sendList(peer);
    }
    return true;
  }
  switch (kindOf(frame)) {
  case FrameKind::begin: {
    const auto wait = std::chrono::milliseconds(std::min<uint64_t>(words[4], 1'000'000'000));
    coordinator_->begin(
        client.number,
        {fleet.replicaOf(client.worldRank), fleet.meshRankOf(client.worldRank), words[1], words[2], words[3]},
        Clock::now() + wait);
    return true;
  }
  case FrameKind::complete:
    coordinator_->complete(client.number, words[1]);
    return true;
  case FrameKind::resume:
    coordinator_->resume(client.number, fleet.replicaOf(client.worldRank), fleet.meshRankOf(client.worldRank),
                         words[1]);
    return true;
  case FrameKind::parentFailed:
    if (words[1] < kMaxReplicas)
      coordinator_->parentFailed(client.number, static_cast<uint32_t>(words[1]));
    return true;
  case FrameKind::list:
    sendList(peer);
    return true;
  default:
    return false;
  }
}

/// Removes the client of a connection.
void Server::forget(uint32_t peer) {
  const auto found = clients_.find(peer);
  if (found == clients_.end())
    return;
  const Client &client = found->second;
  if (coordinator_) {
    coordinator_->lost(client.number);
    if (const std::optional<uint32_t> source = options_.fleet.sourceMeshRank(client.worldRank))
      if (const auto at = sourceClients_.find(*source); at != sourceClients_.end() && at->second == client.number) {
        sourceClients_.erase(at);
        coordinator_->published(*source, {});
      }
  }
  byNumber_.erase(client.number);
  clients_.erase(found);
}

/// Returns false after closing the connection, if the peer does not receive its frames. The peer connects again.
bool Server::send(uint32_t peer, const Frame &frame, std::string_view text) {
  if (messenger_->send(peer, frame, text).ok())
    return true;
  messenger_->disconnect(peer);
  for (Link &link : links_)
    if (link.peer == peer)
      link.peer.reset();
  forget(peer);
  return false;
}

void Server::reply(uint32_t peer, FrameKind kind, const Fetch &fetch) {
  send(peer, makeFrame(kind, {fetch.version.number, fetch.message, fetch.begin, fetch.end, fetch.slot}));
}

/// Whether a range can be served now, perhaps later, or never.
Server::Readiness Server::readiness(const Client &client, const Fetch &fetch, const ServedMessage &served) const {
  if (isSource()) { // a version that is older than this process has other bytes
    const bool same = fetch.version.number == version_.number && fetch.version.incarnation >= incarnation_;
    return same && (client.lease != 0 || !withdrawing_) ? Readiness::ready : Readiness::never;
  }
  if (fetch.version == version_ && MessageTable::ready(served, fetch.begin, fetch.end, progress_))
    return Readiness::ready;
  // A rank of the own replica may begin earlier than this one. A child of another replica exists only if this one
  // pulls.
  const bool own = options_.fleet.replicaOf(client.worldRank) == options_.fleet.replicaOf(options_.worldRank);
  return fetch.version >= version_ && (own || pulling_) ? Readiness::later : Readiness::never;
}

void Server::fetch(uint32_t peer, Client &client, const Fetch &fetch) {
  ServedMessage served;
  const MessageTable::Serves serves = table_.find(static_cast<uint32_t>(fetch.message), client.worldRank, served);
  if (serves == MessageTable::Serves::askSender)
    return reply(peer, FrameKind::askSender, fetch);
  if (serves == MessageTable::Serves::no || fetch.end > served.packing->bytes())
    return; // not a request of a rank with this plan
  switch (readiness(client, fetch, served)) {
  case Readiness::ready:
    return answer(peer, client, fetch, served);
  case Readiness::later:
    client.slots[fetch.slot].parked = fetch;
    return;
  case Readiness::never:
    return reply(peer, FrameKind::gone, fetch);
  }
}

void Server::Unmap::operator()(std::byte *memory) const { ::munmap(memory, kRangeBytes); }

bool Server::allocate(Slot &slot) {
  void *const memory = ::mmap(nullptr, kRangeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  slot.memory.reset(memory == MAP_FAILED ? nullptr : static_cast<std::byte *>(memory));
  return slot.memory != nullptr;
}

void Server::answer(uint32_t peer, Client &client, const Fetch &fetch, const ServedMessage &served) {
  if (client.lease == 0) {
    client.lease = leases_;
    client.since = Clock::now();
  }
  Slot &slot = client.slots[fetch.slot];
  const uint64_t bytes = fetch.end - fetch.begin;
  std::byte *data = served.packing->contiguous();
  slot.inPlace = data != nullptr;
  if (data) {
    data += fetch.begin;
  } else {
    if (!slot.memory && !allocate(slot)) {
      messenger_->disconnect(peer);
      return forget(peer);
    }
    data = slot.memory.get();
    served.packing->pack(fetch.begin, fetch.end, data);
  }
  const auto address = fetch.readable ? reinterpret_cast<uint64_t>(data) : 0;
  const Frame frame = makeFrame(FrameKind::data, {fetch.version.number, fetch.message, fetch.begin, fetch.end,
                                                  fetch.slot, address, client.lease});
  if (fetch.readable) {
    send(peer, frame);
    return;
  }
  slot.sending = true;
  if (!messenger_->sendData(peer, frame, data, bytes, fetch.slot).ok()) {
    messenger_->disconnect(peer);
    forget(peer);
  }
}

/// Answers fetches whose bytes have arrived meanwhile.
void Server::serveParked() {
  if (isSource())
    return;
  std::vector<std::pair<uint32_t, Fetch>> ready;
  for (auto &[peer, client] : clients_)
    for (Slot &slot : client.slots) {
      ServedMessage served;
      if (slot.parked && !slot.sending &&
          table_.find(static_cast<uint32_t>(slot.parked->message), client.worldRank, served) ==
              MessageTable::Serves::yes &&
          readiness(client, *slot.parked, served) != Readiness::later)
        ready.emplace_back(peer, *std::exchange(slot.parked, {}));
    }
  for (const auto &[peer, parked] : ready)
    if (const auto client = clients_.find(peer); client != clients_.end())
      fetch(peer, client->second, parked);
}

/// Ends all leases, and every transfer out of the memory that will change.
void Server::endLeases() {
  ++leases_;
  std::vector<uint32_t> sending;
  for (auto &[peer, client] : clients_) {
    client.lease = 0;
    if (std::any_of(client.slots.begin(), client.slots.end(),
                    [](const Slot &slot) { return slot.sending && slot.inPlace; }))
      sending.push_back(peer);
  }
  for (const uint32_t peer : sending) {
    messenger_->disconnect(peer);
    forget(peer);
  }
}

void Server::addPeer(const ServerAddress &process) {
  const std::unique_lock lock = locked();
  linkTo(process);
}

void Server::linkTo(const ServerAddress &process) {
  if (std::any_of(links_.begin(), links_.end(), [&](const Link &link) { return link.to.token == process.token; }))
    return;
  if (!coordinates()) { // there is one coordinator
    for (const Link &link : links_)
      if (link.peer)
        messenger_->disconnect(*link.peer);
    links_.clear();
  }
  links_.push_back({process, {}, {}, kMaintain, {}});
}

void Server::connect(Link &link) {
  link.retryAt = Clock::now() + link.pause;
  link.pause = std::min(2 * link.pause, 10 * kMaintain);
  const Result<uint32_t> peer = messenger_->connect(link.to.address);
  if (!peer.ok())
    return;
  link.peer = *peer;
  link.lastSent.reset();
  if (send(*peer, makeFrame(FrameKind::hello, {link.to.token, options_.worldRank, kProtocol})) && coordinates())
    send(*peer, makeFrame(FrameKind::coordinator, {options_.token}), address_);
}

/// Sends the coordinator the version that this source rank has published, if it has changed.
void Server::maintainLinks() {
  if (!isSource())
    return;
  if (coordinator_ && lastSent_ != available())
    coordinator_->published(0, {incarnation_, lastSent_ = available()});
  for (Link &link : links_) {
    if (!link.peer && Clock::now() >= link.retryAt)
      connect(link);
    if (!coordinator_ && link.peer && link.lastSent != available()) {
      link.lastSent = available();
      send(*link.peer, makeFrame(FrameKind::published, {available(), options_.token, incarnation_}));
    }
  }
}

void Server::sendAnswers() {
  while (coordinator_) {
    const std::optional<CoordinatorAnswer> answer = coordinator_->next();
    if (!answer)
      return;
    const auto peer = byNumber_.find(answer->client);
    if (peer == byNumber_.end())
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
    send(peer->second, frame);
  }
}

void Server::sendList(uint32_t peer) {
  const std::vector<ReplicaInfo> all = coordinator_->replicas(Clock::now());
  for (size_t first = 0; first == 0 || first < all.size(); first += kListed) {
    ByteWriter writer;
    for (size_t i = first; i < std::min(all.size(), first + kListed); ++i)
      writer.number(all[i].replica)
          .number(all[i].ranks)
          .number(all[i].version)
          .number(static_cast<uint8_t>(all[i].state));
    if (!send(peer, makeFrame(FrameKind::listed, {all.size(), first}), writer.take()))
      return;
  }
}

/// Locks the mutex. The service thread yields while another thread waits for it.
std::unique_lock<std::mutex> Server::locked() {
  contended_ = true;
  std::unique_lock lock(mutex_);
  contended_ = false;
  return lock;
}

Status Server::mayPublish(uint64_t version) {
  const std::unique_lock lock = locked();
  if (version_.number != 0)
    return invalid("version " + std::to_string(version_.number) + " is published already; release it first");
  if (version <= last_)
    return invalid("found version " + std::to_string(version) + ", expected more than " + std::to_string(last_) +
                   (last_ > 0 ? ", the version that was published last" : ""));
  return {};
}

Status Server::publish(uint64_t version, std::vector<CountedDigest> digests) {
  if (Status status = mayPublish(version); !status.ok())
    return status;
  const std::unique_lock lock = locked();
  version_.number = last_ = version;
  digests_ = std::move(digests);
  return {};
}

/// The names of clients with a lease: "replica 2 rank 1 (world rank 7), for 3.2 s".
std::string Server::leaseHolders() const {
  constexpr size_t kShown = 8;
  std::string text;
  size_t count = 0;
  for (const auto &[peer, client] : clients_)
    if (client.lease != 0 && ++count <= kShown) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, ", for %.1f s",
                    std::chrono::duration<double>(Clock::now() - client.since).count());
      text += (text.empty() ? "" : "; ") + options_.fleet.name(client.worldRank) + seconds;
    }
  return count > kShown ? text + "; and " + std::to_string(count - kShown) + " more" : text;
}

size_t Server::leases() {
  const std::unique_lock lock = locked();
  return static_cast<size_t>(
      std::count_if(clients_.begin(), clients_.end(), [](const auto &each) { return each.second.lease != 0; }));
}

/// Serves another version, after all leases have ended.
Status Server::change(std::unique_lock<std::mutex> &lock, const Version &version) {
  change_ = version;
  if (changed_.wait_for(lock, kChange, [&] { return !change_; }))
    return {};
  return failed("the thread that serves this rank's memory has not run for " + std::to_string(kChange.count()) +
                " s; other processes may still read the memory");
}

Status Server::release(const Deadline &deadline) {
  std::unique_lock lock = locked();
  if (version_.number == 0)
    return invalid("no version is published");
  withdrawing_ = true;
  auto leased = [&] {
    return std::any_of(clients_.begin(), clients_.end(), [](const auto &each) { return each.second.lease != 0; });
  };
  while (leased() && !passed(deadline))
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  const std::string names = leaseHolders();
  const uint64_t version = version_.number;
  if (Status status = change(lock, {}); !status.ok())
    return status;
  withdrawing_ = false;
  if (names.empty())
    return {};
  return timedOut("timed out: version " + std::to_string(version) + " was still read by " + names +
                  "; their leases are revoked");
}

Status Server::serve(const Version &version) {
  std::unique_lock lock = locked();
  return version_ == version ? Status() : change(lock, version);
}

void Server::setPulling(bool pulling) {
  const std::unique_lock lock = locked();
  pulling_ = pulling;
}

} // namespace reshard::pull
