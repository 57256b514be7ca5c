// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: the messenger.

#include "backends/ucx_messenger.h"

#include "support/hash.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace reshard::ucx {
namespace {

constexpr uint64_t kProtocol = 0x3147534d48535201; // differs in each version of the messages
constexpr char kMagic[16] = "reshard-frame-1";
constexpr size_t kMaxAddress = 4096;
constexpr uint64_t kShortBytes = 2048; // longer data are sent by rendezvous
/// The most that a peer may do before this process has reacted. Beyond it, it breaks the protocol.
// Of hellos: peers that have not sent a frame yet.
constexpr size_t kMostEarly = size_t{1} << 14, kMostIncoming = 2 * kMaxFrames, kMostHellos = 256;
/// Bytes that are copied out of a sender's memory before UCX makes progress again.
constexpr uint64_t kReadBytes = 1 << 20;
/// Seconds that a disconnect waits until UCX has ended the operations on memory of transfers.
constexpr double kCloseSeconds = 0.1;
constexpr auto kWatch = std::chrono::milliseconds(100);
constexpr auto kPing = std::chrono::seconds(1);
constexpr std::chrono::duration<double> kSilent(kSilentSeconds);

/// Begins an address; that of the worker follows.
struct Greeting {
  char magic[sizeof kMagic];
  uint64_t token;
  uint64_t check; // a hash of all, with 0 here
  PeerMemory::Address memory;
};

uint64_t checkOf(Greeting greeting, std::string_view rest) {
  greeting.check = 0;
  std::string all(reinterpret_cast<const char *>(&greeting), sizeof greeting);
  return hashOf(all.append(rest));
}

uint64_t randomNumber() {
  static thread_local std::random_device random;
  return uint64_t{random()} << 32 | random();
}

Status lostBy(ucs_status_t status) {
  return failed(std::string("the connection is lost: ") + ucs_status_string(status) +
                " (UCX); see whether the peer has ended");
}

bool inProgress(void *request) { return request && ucp_request_check_status(request) == UCS_INPROGRESS; }

} // namespace

Status UcxMessenger::open() {
  if (Status status = worker_.open(64); !status.ok())
    return status;
  if (Status status = worker_.handle(0, &onMessage, this); !status.ok())
    return status;
  std::string address;
  if (Status status = worker_.appendAddress(address); !status.ok())
    return status;
  token_ = randomNumber();
  Greeting greeting{};
  std::memcpy(greeting.magic, kMagic, sizeof kMagic);
  greeting.token = token_;
  greeting.memory = PeerMemory::own();
  greeting.check = checkOf(greeting, address);
  address_.assign(reinterpret_cast<const char *>(&greeting), sizeof greeting);
  address_ += address;
  if (address_.size() > kMaxAddress)
    return failed("an address of " + std::to_string(address_.size()) + " bytes, expected at most " +
                  std::to_string(kMaxAddress) + ": choose fewer network devices by UCX_NET_DEVICES");
  return {};
}

UcxMessenger::~UcxMessenger() {
  for (uint32_t number = 0; number < peers_.size(); ++number)
    if (MessengerPeer *const peer = find(number)) {
      if (peer->remote)
        post(*peer, Kind::bye);
      close(*peer, 0);
    }
  if (worker_.isOpen())
    breakDown();
}

Result<uint32_t> UcxMessenger::addPeer(std::string_view address) {
  Greeting greeting;
  if (address.size() <= sizeof greeting || address.size() > kMaxAddress)
    return invalid("the address of a messenger has " + std::to_string(address.size()) + " bytes, expected " +
                   std::to_string(sizeof greeting + 1) + " to " + std::to_string(kMaxAddress));
  std::memcpy(&greeting, address.data(), sizeof greeting);
  const std::string worker(address.substr(sizeof greeting));
  if (std::memcmp(greeting.magic, kMagic, sizeof kMagic) != 0 || greeting.check != checkOf(greeting, worker))
    return invalid("the address of a messenger is damaged, or of another version of reshard: expected that it begins "
                   "with '" +
                   std::string(kMagic) + "'");
  if (!worker_.isOpen())
    return failed("the messenger is closed: UCX did not end a transfer");
  const auto free = std::find(peers_.begin(), peers_.end(), nullptr);
  const auto number = static_cast<uint32_t>(free - peers_.begin());
  if (number == kMaxPeers)
    return failed("the messenger has " + std::to_string(kMaxPeers) + " connections, which is the most");
  if (free == peers_.end())
    peers_.emplace_back();
  auto peer = std::make_unique<MessengerPeer>();
  peer->identity = (randomNumber() | uint64_t{1} << 63) / kMaxPeers * kMaxPeers + number;
  peer->token = greeting.token;
  peer->heard = peer->pinged = Clock::now();
  peer->memory.open(greeting.memory);
  if (const ucs_status_t status = worker_.connect(worker.data(), {&onFailure, this}, &peer->connection);
      status != UCS_OK)
    peer->failure = lostBy(status);
  peers_[number] = std::move(peer);
  return number;
}

Result<uint32_t> UcxMessenger::connect(std::string_view address) {
  const Result<uint32_t> number = addPeer(address);
  if (!number.ok())
    return number;
  MessengerPeer &peer = *peers_[*number];
  peer.known = true;
  if (peer.failure.ok()) {
    PostHeader header;
    header.data = peer.identity;
    header.address = reinterpret_cast<uint64_t>(&peer.identity);
    post(peer, Kind::hello, header, address_);
  }
  return number;
}

void UcxMessenger::accept(const PostHeader &header, const std::string &address) {
  const bool repeated =
      std::any_of(peers_.begin(), peers_.end(), [&](const auto &each) { return each && each->remote == header.data; });
  const auto strangers =
      std::count_if(peers_.begin(), peers_.end(), [](const auto &each) { return each && !each->known; });
  const bool refused = repeated || static_cast<size_t>(strangers) >= kMostHellos;
  const Result<uint32_t> number = refused ? invalid("a hello is repeated, or one of too many") : addPeer(address);
  if (!number.ok()) {
    ++dropped_;
    return;
  }
  MessengerPeer &peer = *peers_[*number];
  peer.remote = header.data;
  peer.remoteAt = header.address;
  if (!peer.failure.ok())
    return;
  PostHeader welcome;
  welcome.data = peer.identity;
  welcome.address = reinterpret_cast<uint64_t>(&peer.identity);
  post(peer, Kind::welcome, welcome);
}

MessengerPeer *UcxMessenger::find(uint32_t peer) const {
  return peer < peers_.size() && peers_[peer] && !peers_[peer]->ended ? peers_[peer].get() : nullptr;
}

Status UcxMessenger::registerMemory(std::byte *data, uint64_t bytes) {
  return worker_.isOpen() ? worker_.registerMemory(data, bytes) : failed("the messenger is closed");
}

bool UcxMessenger::readsMemory(uint32_t peer) const {
  const MessengerPeer *const from = find(peer);
  return from && from->memory.isOpen();
}

bool UcxMessenger::readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) {
  // The process may have ended, and another one may have its number.
  return readsMemory(peer) && peers_[peer]->memory.isAlive() && peers_[peer]->memory.read(to, from, bytes);
}

void UcxMessenger::post(MessengerPeer &peer, Kind kind, PostHeader header, std::string_view text) {
  auto post = std::make_unique<Post>();
  post->header = header;
  post->header.protocol = kProtocol;
  post->header.token = peer.token;
  post->header.kind = kind;
  post->text = text;
  if (peer.remote == 0 && kind != Kind::hello)
    peer.waiting.push_back(std::move(post));
  else
    start(peer, std::move(post));
}

void UcxMessenger::start(MessengerPeer &peer, std::unique_ptr<Post> post) {
  if (!peer.failure.ok())
    return;
  post->header.connection = peer.remote;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  post->request = ucp_am_send_nbx(peer.connection, 0, &post->header, sizeof post->header, post->text.data(),
                                  post->text.size(), &param);
  if (UCS_PTR_IS_ERR(post->request))
    peer.failure = lostBy(UCS_PTR_STATUS(post->request));
  else if (post->request)
    peer.posts.push_back(std::move(post));
}

Status UcxMessenger::sendFrame(uint32_t number, PostHeader header, std::string_view text) {
  MessengerPeer *const peer = find(number);
  if (!peer || !peer->failure.ok())
    return peer ? peer->failure : failed("the connection is lost");
  if (text.size() > kMaxFrameText)
    return invalid("the text of a frame has " + std::to_string(text.size()) + " bytes, expected at most " +
                   std::to_string(kMaxFrameText));
  if (peer->posts.size() + peer->waiting.size() >= kMaxFrames || peer->outgoing.size() >= kMaxFrames)
    return failed("the peer has not taken " + std::to_string(kMaxFrames) + " frames");
  header.number = peer->sent++;
  post(*peer, Kind::frame, header, text);
  return peer->failure;
}

Status UcxMessenger::send(uint32_t peer, const Frame &frame, std::string_view text) {
  PostHeader header;
  header.frame = frame;
  return sendFrame(peer, header, text);
}

Status UcxMessenger::sendData(uint32_t number, const Frame &frame, const std::byte *data, uint64_t bytes,
                              uint64_t token) {
  if (bytes == 0)
    return invalid("no data; expected at least one byte");
  MessengerPeer *const peer = find(number);
  PostHeader header;
  header.frame = frame;
  header.bytes = bytes;
  header.data = peer ? peer->nextData : 0;
  header.address = reinterpret_cast<uint64_t>(data);
  if (Status status = sendFrame(number, header, {}); !status.ok())
    return status;
  Outgoing &outgoing = peer->outgoing[peer->nextData++];
  outgoing.memory = data;
  outgoing.bytes = bytes;
  outgoing.token = token;
  return {};
}

Status UcxMessenger::receive(uint32_t number, uint64_t data, std::byte *to, uint64_t token) {
  MessengerPeer *const peer = find(number);
  if (!peer || !peer->failure.ok())
    return peer ? peer->failure : failed("the connection is lost");
  const auto found = peer->incoming.find(data);
  if (found == peer->incoming.end() || found->second.state != Incoming::kAnnounced)
    return invalid("no data with number " + std::to_string(data) + " wait for receive()");
  Incoming &incoming = found->second;
  incoming.to = to;
  incoming.token = token;
  if (peer->memory.isOpen()) {
    incoming.state = Incoming::kReads;
    reading_.emplace_back(peer->identity, data);
    return {};
  }
  incoming.state = Incoming::kWanted;
  PostHeader header;
  header.data = data;
  post(*peer, Kind::want, header);
  return peer->failure;
}

void UcxMessenger::describe(ucp_request_param_t &param, const std::byte *data, uint64_t bytes) const {
  if (const Region *region = bytes > kShortBytes ? worker_.regionOf(data, bytes) : nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = region->handle;
  }
}

void UcxMessenger::sendWanted(uint32_t number, uint64_t data) {
  MessengerPeer &peer = *peers_[number];
  const auto found = peer.outgoing.find(data);
  if (found == peer.outgoing.end() || found->second.request || !peer.failure.ok())
    return;
  Outgoing &outgoing = found->second;
  PostHeader &header = outgoing.header;
  header.protocol = kProtocol;
  header.token = peer.token;
  header.connection = peer.remote;
  header.kind = Kind::data;
  header.data = data;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = outgoing.bytes <= kShortBytes ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  describe(param, outgoing.memory, outgoing.bytes);
  void *const request =
      ucp_am_send_nbx(peer.connection, 0, &header, sizeof header, outgoing.memory, outgoing.bytes, &param);
  if (UCS_PTR_IS_ERR(request))
    peer.failure = lostBy(UCS_PTR_STATUS(request));
  else if (!(outgoing.request = request))
    completeOutgoing(number, data, true);
}

void UcxMessenger::receiveWanted(MessengerPeer &peer, Incoming &incoming) {
  ucp_request_param_t param{};
  describe(param, incoming.to, incoming.bytes);
  void *const request =
      ucp_am_recv_data_nbx(worker_, std::exchange(incoming.descriptor, nullptr), incoming.to, incoming.bytes, &param);
  if (UCS_PTR_IS_ERR(request))
    peer.failure = lostBy(UCS_PTR_STATUS(request));
  else
    incoming.request = request;
  incoming.state = Incoming::kMoves;
}

std::optional<MessengerEvent> UcxMessenger::poll() {
  if (events_.empty() && worker_.isOpen())
    progress();
  if (events_.empty())
    return {};
  MessengerEvent event = std::move(events_.front());
  events_.pop_front();
  if (event.kind == MessengerEvent::kLost)
    peers_[event.peer].reset();
  return event;
}

void UcxMessenger::progress() {
  ucp_worker_progress(worker_);
  for (const auto &[header, address] : std::exchange(hellos_, {}))
    accept(header, address);
  for (const Task &task : std::exchange(tasks_, {})) {
    MessengerPeer *const peer = findIdentity(task.identity);
    if (!peer || peer->identity != task.identity)
      continue;
    PostHeader header;
    header.data = task.data;
    if (task.kind == Kind::data)
      sendWanted(numberOf(task.identity), task.data);
    else if (task.kind != Kind::pong || peer->posts.size() < kMaxFrames)
      post(*peer, task.kind, header);
  }
  if (!reading_.empty())
    readPart();
  watch();
  for (uint32_t number = 0; number < peers_.size() && worker_.isOpen(); ++number)
    if (find(number))
      progress(number);
  std::erase_if(ended_, [](const std::unique_ptr<Post> &post) {
    if (inProgress(post->request))
      return false;
    ucp_request_free(post->request);
    return true;
  });
}

void UcxMessenger::progress(uint32_t number) {
  MessengerPeer &peer = *peers_[number];
  while (!peer.waiting.empty() && peer.remote != 0) {
    std::unique_ptr<Post> post = std::move(peer.waiting.front());
    peer.waiting.pop_front();
    start(peer, std::move(post));
  }
  const auto ended = [&](void *&request) {
    if (!request || inProgress(request))
      return false;
    const ucs_status_t status = ucp_request_check_status(request);
    ucp_request_free(std::exchange(request, nullptr));
    if (status != UCS_OK && peer.failure.ok())
      peer.failure = lostBy(status);
    return true;
  };
  while (!peer.posts.empty() && ended(peer.posts.front()->request))
    peer.posts.pop_front();
  for (auto each = peer.outgoing.begin(); each != peer.outgoing.end();) {
    const auto outgoing = each++;
    if (ended(outgoing->second.request) && peer.failure.ok())
      completeOutgoing(number, outgoing->first, true);
  }
  for (auto each = peer.incoming.begin(); each != peer.incoming.end();) {
    const auto incoming = each++;
    if (incoming->second.descriptor && peer.failure.ok())
      receiveWanted(peer, incoming->second);
    if (incoming->second.state == Incoming::kMoves && (!incoming->second.request || ended(incoming->second.request)) &&
        peer.failure.ok())
      completeIncoming(number, incoming->first, true);
  }
  if (!peer.failure.ok())
    end(number, Status(peer.failure));
}

void UcxMessenger::readPart() {
  const auto [identity, data] = reading_.front();
  reading_.pop_front();
  MessengerPeer *const peer = findIdentity(identity);
  if (!peer || peer->identity != identity)
    return;
  Incoming &incoming = peer->incoming.at(data);
  const uint64_t bytes = std::min(kReadBytes, incoming.bytes - incoming.copied);
  const bool read = peer->memory.read(incoming.to + incoming.copied, incoming.from + incoming.copied, bytes);
  incoming.copied += bytes;
  if (read && incoming.copied < incoming.bytes) {
    reading_.emplace_front(identity, data);
    return;
  }
  incoming.state = read ? Incoming::kCopied : Incoming::kWanted; // the memory of a GPU cannot be read so
  PostHeader header;
  header.data = data;
  post(*peer, read ? Kind::taken : Kind::want, header);
}

void UcxMessenger::watch() {
  const Clock::time_point now = Clock::now();
  if (now - watched_ < kWatch)
    return;
  const bool paused = now - std::exchange(watched_, now) > kPing; // then peers were not heard, but by our fault
  for (uint32_t number = 0; number < peers_.size(); ++number) {
    MessengerPeer *const peer = find(number);
    if (peer && paused)
      peer->heard = now;
    if (peer && peer->failure.ok())
      peer->failure = watch(*peer, now);
  }
}

Status UcxMessenger::watch(MessengerPeer &peer, Clock::time_point now) {
  const bool silent = now - peer.heard > kSilent;
  const std::string text = " for " + std::to_string(static_cast<int>(kSilentSeconds)) + " s";
  if (!peer.known && silent)
    return failed("the peer has sent no frame" + text);
  if (peer.memory.isOpen()) {
    if (!peer.memory.isAlive())
      return failed("the process of the peer has ended");
    uint64_t found = 0;
    if (peer.remote == 0)
      return silent ? failed("the peer has not answered" + text) : Status();
    if (!peer.memory.read(reinterpret_cast<std::byte *>(&found), peer.remoteAt, sizeof found) || found != peer.remote)
      return failed("the peer has disconnected");
    return {};
  }
  if (silent)
    return failed("the peer has been silent" + text + ": it is stopped, or the network is cut");
  if (peer.remote != 0 && now - peer.pinged > kPing && peer.posts.size() < kMaxFrames) {
    peer.pinged = now;
    post(peer, Kind::ping);
  }
  return {};
}

void UcxMessenger::keep(void *request) {
  if (!request)
    return;
  auto post = std::make_unique<Post>();
  post->request = request;
  ended_.push_back(std::move(post));
}

bool UcxMessenger::close(MessengerPeer &peer, double seconds) {
  peer.ended = true;
  peer.identity = 0;
  for (auto &[number, incoming] : peer.incoming)
    if (incoming.descriptor)
      ucp_am_data_release(worker_, std::exchange(incoming.descriptor, nullptr));
  if (peer.connection)
    keep(Worker::disconnect(std::exchange(peer.connection, nullptr), true));
  std::vector<void *> requests;
  for (const auto &[number, outgoing] : peer.outgoing)
    requests.push_back(outgoing.request);
  for (const auto &[number, incoming] : peer.incoming)
    requests.push_back(incoming.request);
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  bool busy = false;
  while ((busy = std::any_of(requests.begin(), requests.end(), inProgress)) && Clock::now() < deadline)
    ucp_worker_progress(worker_);
  for (void *request : requests)
    if (request)
      ucp_request_free(request);
  for (std::unique_ptr<Post> &post : peer.posts)
    ended_.push_back(std::move(post));
  peer.posts.clear();
  return !busy;
}

void UcxMessenger::tell(uint32_t number, const Status &reason) {
  MessengerPeer &peer = *peers_[number];
  MessengerEvent event;
  event.peer = number;
  event.ok = false;
  event.kind = MessengerEvent::kSent;
  for (const auto &[data, outgoing] : std::exchange(peer.outgoing, {})) {
    event.token = outgoing.token;
    events_.push_back(event);
  }
  event.kind = MessengerEvent::kReceived;
  for (const auto &[data, incoming] : std::exchange(peer.incoming, {})) {
    event.token = incoming.token;
    if (incoming.state != Incoming::kAnnounced)
      events_.push_back(event);
  }
  event.kind = MessengerEvent::kLost;
  event.token = 0;
  event.reason = reason;
  if (peer.known)
    events_.push_back(event);
  else
    peers_[number].reset();
}

void UcxMessenger::end(uint32_t number, const Status &reason) {
  const bool closed = close(*peers_[number], kCloseSeconds);
  tell(number, reason);
  if (!closed)
    breakDown();
}

void UcxMessenger::disconnect(uint32_t number) {
  if (MessengerPeer *const peer = find(number)) {
    if (peer->remote != 0)
      post(*peer, Kind::bye);
    const bool closed = close(*peer, kCloseSeconds);
    peers_[number].reset();
    if (!closed)
      breakDown();
  }
  if (number < peers_.size())
    peers_[number].reset();
  std::erase_if(events_, [&](const MessengerEvent &event) { return event.peer == number; });
}

void UcxMessenger::breakDown() {
  for (uint32_t number = 0; number < peers_.size(); ++number)
    if (MessengerPeer *const peer = find(number)) {
      close(*peer, 0);
      tell(number, failed("the connection is lost: UCX did not end a transfer of another connection"));
    }
  const auto deadline = Clock::now() + std::chrono::duration<double>(kCloseSeconds);
  const auto busy = [](const std::unique_ptr<Post> &post) { return inProgress(post->request); };
  while (std::any_of(ended_.begin(), ended_.end(), busy) && Clock::now() < deadline)
    ucp_worker_progress(worker_);
  for (const std::unique_ptr<Post> &post : ended_)
    ucp_request_free(post->request);
  worker_.close(); // before what it may still read is freed
  ended_.clear();
}

void UcxMessenger::onFailure(void *messenger, ucp_ep_h connection, ucs_status_t status) {
  for (const auto &peer : static_cast<UcxMessenger *>(messenger)->peers_)
    if (peer && peer->connection == connection && peer->failure.ok())
      peer->failure = lostBy(status);
}

ucs_status_t UcxMessenger::onMessage(void *messenger, const void *header, size_t headerBytes, void *data, size_t bytes,
                                     const ucp_am_recv_param_t *param) {
  UcxMessenger &self = *static_cast<UcxMessenger *>(messenger);
  const bool announced = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  PostHeader own;
  if (headerBytes == sizeof own)
    std::memcpy(&own, header, sizeof own);
  if (own.protocol != kProtocol || own.token != self.token_)
    ++self.dropped_;
  else if (self.arrive(own, data, bytes, announced))
    return UCS_INPROGRESS;
  return announced ? UCS_ERR_REJECTED : UCS_OK;
}

bool UcxMessenger::arrive(const PostHeader &header, void *data, size_t bytes, bool announced) {
  const std::string_view text(static_cast<const char *>(data), announced ? 0 : bytes);
  if (header.kind == Kind::hello && !announced) {
    if (hellos_.size() < kMostHellos && text.size() <= kMaxAddress && header.data != 0)
      hellos_.emplace_back(header, text);
    else
      ++dropped_;
    return false;
  }
  const uint32_t number = numberOf(header.connection);
  MessengerPeer *const peer = find(number);
  if (!peer || peer->identity != header.connection || (announced && header.kind != Kind::data)) {
    ++dropped_;
    return false;
  }
  peer->heard = Clock::now();
  if (header.kind == Kind::data)
    return arriveData(number, header, data, bytes, announced);
  if (header.kind == Kind::frame) {
    arriveFrame(number, header, text);
  } else if (header.kind == Kind::welcome && peer->remote == 0) {
    peer->remote = header.data;
    peer->remoteAt = header.address;
  } else if (header.kind == Kind::want) {
    tasks_.push_back({peer->identity, Kind::data, header.data});
  } else if (header.kind == Kind::taken && peer->outgoing.count(header.data) > 0 &&
             !peer->outgoing[header.data].request) {
    completeOutgoing(number, header.data, true);
    tasks_.push_back({peer->identity, Kind::confirmed, header.data});
  } else if (header.kind == Kind::confirmed) {
    const auto found = peer->incoming.find(header.data);
    if (found != peer->incoming.end() && found->second.state == Incoming::kCopied)
      completeIncoming(number, header.data, true);
  } else if (header.kind == Kind::bye && peer->failure.ok()) {
    peer->failure = failed("the peer has disconnected");
  } else if (header.kind == Kind::ping) {
    tasks_.push_back({peer->identity, Kind::pong, 0});
  }
  return false;
}

bool UcxMessenger::arriveData(uint32_t number, const PostHeader &header, void *data, size_t bytes, bool announced) {
  MessengerPeer &peer = *peers_[number];
  const auto found = peer.incoming.find(header.data);
  if (found == peer.incoming.end() || found->second.state != Incoming::kWanted || found->second.descriptor ||
      found->second.bytes != bytes) {
    ++dropped_;
    return false;
  }
  if (announced) {
    found->second.descriptor = data;
    return true;
  }
  std::memcpy(found->second.to, data, bytes);
  completeIncoming(number, header.data, true);
  return false;
}

void UcxMessenger::arriveFrame(uint32_t number, const PostHeader &header, std::string_view text) {
  MessengerPeer &peer = *peers_[number];
  const bool known = header.number < peer.admitted || peer.early.count(header.number) > 0;
  if (known || text.size() > kMaxFrameText || (header.bytes > 0 && peer.incoming.count(header.data) > 0)) {
    ++dropped_;
    return;
  }
  if (peer.early.size() >= kMostEarly || peer.incoming.size() >= kMostIncoming) {
    if (peer.failure.ok())
      peer.failure = failed("the peer breaks the protocol: it sends too much at once");
    return;
  }
  if (header.bytes > 0) {
    Incoming &incoming = peer.incoming[header.data];
    incoming.bytes = header.bytes;
    incoming.from = header.address;
  }
  MessengerEvent &event = peer.early[header.number];
  event.kind = MessengerEvent::kArrived;
  event.peer = number;
  event.frame = header.frame;
  event.text = text;
  event.dataBytes = header.bytes;
  event.data = header.bytes > 0 ? header.data : 0;
  for (auto next = peer.early.find(peer.admitted); next != peer.early.end(); next = peer.early.find(peer.admitted)) {
    events_.push_back(std::move(next->second));
    peer.early.erase(next);
    peer.known = true;
    ++peer.admitted;
  }
}

void UcxMessenger::completeIncoming(uint32_t number, uint64_t data, bool ok) {
  const auto incoming = peers_[number]->incoming.find(data);
  MessengerEvent event;
  event.kind = MessengerEvent::kReceived;
  event.peer = number;
  event.token = incoming->second.token;
  event.ok = ok;
  events_.push_back(event);
  peers_[number]->incoming.erase(incoming);
}

void UcxMessenger::completeOutgoing(uint32_t number, uint64_t data, bool ok) {
  const auto outgoing = peers_[number]->outgoing.find(data);
  MessengerEvent event;
  event.kind = MessengerEvent::kSent;
  event.peer = number;
  event.token = outgoing->second.token;
  event.ok = ok;
  events_.push_back(event);
  peers_[number]->outgoing.erase(outgoing);
}

} // namespace reshard::ucx

extern "C" {

extern const uint32_t reshard_open_messenger_version = reshard::kMessengerVersion;

reshard::Messenger *reshard_open_messenger(reshard::Status &error) {
  auto messenger = std::make_unique<reshard::ucx::UcxMessenger>();
  error = messenger->open();
  return error.ok() ? messenger.release() : nullptr;
}
}
