// SPDX-License-Identifier: Apache-2.0
// libreshard_ucx.so: the messenger.

#include "executor/backends/ucx_messenger.h"

#include "base/hash.h"
#include "base/random.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace reshard::ucx {
namespace {

constexpr uint64_t kProtocol = 0x3147534d48535201; // differs in each version of the messages
constexpr char kMagic[16] = "reshard-frame-1";
constexpr size_t kMaxAddress = 4096;
/// Data are sent in pieces, of which so many are in flight. UCX receives a piece as a whole or not at all.
constexpr uint64_t kPieceBytes = 48 << 10;
constexpr size_t kPieces = 32;
constexpr uint64_t kMaxPostBytes = sizeof(PostHeader) + std::max<uint64_t>(kPieceBytes, kMaxAddress);
/// The most frames that overtake others, and announced data, of one peer; a peer that exceeds one breaks the protocol.
/// kMaxHellos: peers that have not sent a frame yet; further hellos are dropped.
constexpr size_t kMaxEarly = size_t{1} << 14, kMaxIncoming = 2 * kMaxFrames, kMaxHellos = 256;
/// Bytes that are copied out of a sender's memory before UCX makes progress again.
constexpr uint64_t kReadBytes = 1 << 20;
/// Seconds that the destructor waits until the peers have received the last messages.
constexpr double kCloseSeconds = 0.1;
constexpr auto kWatch = std::chrono::milliseconds(100);
constexpr auto kPing = std::chrono::seconds(1);
constexpr std::chrono::duration<double> kUnresponsive(kUnresponsiveSeconds);

/// Begins an address; that of the worker follows.
struct AddressPrefix {
  char magic[sizeof kMagic];
  uint64_t token;
  uint64_t check; // a hash of all, with 0 here
  PeerMemory::Address memory;
};

uint64_t checkOf(AddressPrefix prefix, std::string_view rest) {
  prefix.check = 0;
  std::string all(reinterpret_cast<const char *>(&prefix), sizeof prefix);
  return hashOf(all.append(rest));
}

bool inProgress(void *request) { return request && ucp_request_check_status(request) == UCS_INPROGRESS; }

} // namespace

Status UcxMessenger::open() {
  if (Status status = worker_.open(64, UCP_FEATURE_TAG | UCP_FEATURE_AM); !status.ok())
    return status;
  // UCX ends a process that receives active messages and has no function for them.
  if (Status status = worker_.handle(0, &onStranger, this); !status.ok())
    return status;
  std::string address;
  if (Status status = worker_.appendAddress(address); !status.ok())
    return status;
  token_ = randomNumber();
  AddressPrefix prefix{};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  prefix.token = token_;
  prefix.memory = PeerMemory::own();
  prefix.check = checkOf(prefix, address);
  address_.assign(reinterpret_cast<const char *>(&prefix), sizeof prefix);
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
      close(*peer);
    }
  const auto deadline = Clock::now() + std::chrono::duration<double>(kCloseSeconds);
  const auto busy = [](const std::unique_ptr<Post> &post) { return inProgress(post->request); };
  while ((std::any_of(ended_.begin(), ended_.end(), busy) || worker_.disconnects()) && Clock::now() < deadline)
    worker_.progress();
  for (const auto *posts : {&ended_, &arrivals_})
    for (const std::unique_ptr<Post> &post : *posts)
      if (post->request)
        ucp_request_free(post->request);
  worker_.close(); // before what it may still access is freed
}

Result<uint32_t> UcxMessenger::addPeer(std::string_view address) {
  AddressPrefix prefix;
  if (address.size() <= sizeof prefix || address.size() > kMaxAddress)
    return invalid("the address of a messenger has " + std::to_string(address.size()) + " bytes, expected " +
                   std::to_string(sizeof prefix + 1) + " to " + std::to_string(kMaxAddress));
  std::memcpy(&prefix, address.data(), sizeof prefix);
  const std::string worker(address.substr(sizeof prefix));
  if (std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0 || prefix.check != checkOf(prefix, worker))
    return invalid("the address of a messenger is damaged, or of another version of reshard: expected that it begins "
                   "with '" +
                   std::string(kMagic) + "'");
  const auto free = std::find(peers_.begin(), peers_.end(), nullptr);
  const auto number = static_cast<uint32_t>(free - peers_.begin());
  if (number == kMaxPeers)
    return failed("the messenger has " + std::to_string(kMaxPeers) + " connections, which is the most");
  if (free == peers_.end())
    peers_.emplace_back();
  auto peer = std::make_unique<MessengerPeer>();
  peer->identity = (randomNumber() | uint64_t{1} << 63) / kMaxPeers * kMaxPeers + number;
  peer->token = prefix.token;
  peer->lastSeen = peer->pinged = Clock::now();
  peer->memory.open(prefix.memory);
  if (const ucs_status_t status = worker_.connect(worker.data(), {&onFailure, this}, &peer->connection);
      status != UCS_OK)
    fail(*peer, status);
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
  const bool refused = repeated || static_cast<size_t>(strangers) >= kMaxHellos;
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
  header.protocol = kProtocol;
  header.token = peer.token;
  header.kind = kind;
  post->bytes.reserve(sizeof header + text.size());
  post->bytes.append(reinterpret_cast<const char *>(&header), sizeof header).append(text);
  if (peer.remote == 0 && kind != Kind::hello)
    peer.waiting.push_back(std::move(post));
  else
    start(peer, std::move(post));
}

void UcxMessenger::start(MessengerPeer &peer, std::unique_ptr<Post> post) {
  if (!peer.failure.ok())
    return;
  PostHeader header = post->header();
  header.connection = peer.remote;
  std::memcpy(post->bytes.data(), &header, sizeof header);
  const ucp_request_param_t param{};
  post->request = ucp_tag_send_nbx(peer.connection, post->bytes.data(), post->bytes.size(), kProtocol, &param);
  if (UCS_PTR_IS_ERR(post->request))
    fail(peer, UCS_PTR_STATUS(std::exchange(post->request, nullptr)));
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
    return failed("the peer has not received " + std::to_string(kMaxFrames) + " frames");
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
  incoming.state = Incoming::kRequested;
  PostHeader header;
  header.data = data;
  post(*peer, Kind::request, header);
  return peer->failure;
}

void UcxMessenger::sendPieces(uint32_t number) {
  MessengerPeer &peer = *peers_[number];
  for (auto each = peer.outgoing.begin(); each != peer.outgoing.end() && peer.posts.size() < kPieces;) {
    const uint64_t data = each->first;
    Outgoing &outgoing = (each++)->second;
    if (!outgoing.requested)
      continue;
    while (outgoing.sent < outgoing.bytes && peer.posts.size() < kPieces && peer.failure.ok()) {
      PostHeader header;
      header.data = data;
      header.address = outgoing.sent;
      const uint64_t bytes = std::min(kPieceBytes, outgoing.bytes - outgoing.sent);
      post(peer, Kind::data, header, {reinterpret_cast<const char *>(outgoing.memory + outgoing.sent), bytes});
      outgoing.sent += bytes;
    }
    if (outgoing.sent == outgoing.bytes)
      complete(MessengerEvent::kSent, number, peer.outgoing, data);
  }
}

std::optional<MessengerEvent> UcxMessenger::poll() {
  if (events_.empty())
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
  worker_.progress();
  receiveMessages();
  for (const auto &[header, address] : std::exchange(hellos_, {}))
    accept(header, address);
  for (const PendingPost &task : std::exchange(tasks_, {})) {
    MessengerPeer *const peer = findIdentity(task.identity);
    if (!peer || peer->identity != task.identity)
      continue;
    PostHeader header;
    header.data = task.data;
    if (task.kind != Kind::pong || peer->posts.size() < kMaxFrames)
      post(*peer, task.kind, header);
  }
  if (!reading_.empty())
    readPart();
  watch();
  for (uint32_t number = 0; number < peers_.size(); ++number)
    if (find(number))
      progress(number);
  std::erase_if(ended_, [](const std::unique_ptr<Post> &post) {
    if (inProgress(post->request))
      return false;
    ucp_request_free(post->request);
    return true;
  });
}

void UcxMessenger::receiveMessages() {
  ucp_tag_recv_info_t info;
  for (int count = 0; count < 64; ++count) {
    const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, 0, 0, 1, &info);
    if (!message)
      break;
    const bool fits = info.sender_tag == kProtocol && info.length >= sizeof(PostHeader) && info.length <= kMaxPostBytes;
    auto post = std::make_unique<Post>();
    post->bytes.resize(fits ? info.length : 0); // else UCX drops the message
    const ucp_request_param_t param{};
    post->request = ucp_tag_msg_recv_nbx(worker_, post->bytes.data(), post->bytes.size(), message, &param);
    if (UCS_PTR_IS_ERR(post->request) || !fits)
      ++dropped_;
    else if (!post->request)
      arrive(*post);
    if (UCS_PTR_IS_PTR(post->request))
      arrivals_.push_back(std::move(post));
  }
  std::erase_if(arrivals_, [this](const std::unique_ptr<Post> &post) {
    if (inProgress(post->request))
      return false;
    const ucs_status_t status = ucp_request_check_status(post->request);
    ucp_request_free(std::exchange(post->request, nullptr));
    if (status == UCS_OK && !post->bytes.empty())
      arrive(*post);
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
    if (status != UCS_OK)
      fail(peer, status);
    return true;
  };
  while (!peer.posts.empty() && ended(peer.posts.front()->request))
    peer.posts.pop_front();
  sendPieces(number);
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
  incoming.state = read ? Incoming::kCopied : Incoming::kRequested;
  incoming.copied = 0; // counts the pieces from now on
  PostHeader header;
  header.data = data;
  post(*peer, read ? Kind::taken : Kind::request, header);
}

void UcxMessenger::watch() {
  const Clock::time_point now = Clock::now();
  if (now - watched_ < kWatch)
    return;
  const bool paused =
      now - std::exchange(watched_, now) > kPing; // this process did not run, so it could not hear its peers
  for (uint32_t number = 0; number < peers_.size(); ++number) {
    MessengerPeer *const peer = find(number);
    if (peer && paused)
      peer->lastSeen = now;
    if (peer && peer->failure.ok())
      peer->failure = watch(*peer, now);
  }
}

Status UcxMessenger::watch(MessengerPeer &peer, Clock::time_point now) {
  const bool unresponsive = now - peer.lastSeen > kUnresponsive;
  const std::string text = " for " + std::to_string(static_cast<int>(kUnresponsiveSeconds)) + " s";
  if (!peer.known && unresponsive)
    return failed("the peer has sent no frame" + text);
  if (peer.memory.isOpen()) {
    if (!peer.memory.isAlive())
      return failed("the process of the peer has ended");
    uint64_t found = 0;
    if (peer.remote == 0)
      return unresponsive ? failed("the peer has not answered" + text) : Status();
    if (!peer.memory.read(reinterpret_cast<std::byte *>(&found), peer.remoteAt, sizeof found) || found != peer.remote)
      return failed("the peer has disconnected");
    return {};
  }
  if (unresponsive)
    return failed("the peer has been silent" + text + ": it is stopped, or the network is cut");
  if (peer.remote != 0 && now - peer.pinged > kPing && peer.posts.size() < kMaxFrames) {
    peer.pinged = now;
    post(peer, Kind::ping);
  }
  return {};
}

void UcxMessenger::close(MessengerPeer &peer) {
  peer.ended = true;
  peer.identity = 0;
  if (peer.connection)
    worker_.disconnect(std::exchange(peer.connection, nullptr), peer.remote == 0); // then only a hello was sent
  for (std::unique_ptr<Post> &post : peer.posts)
    ended_.push_back(std::move(post));
  peer.posts.clear();
}

void UcxMessenger::reportLoss(uint32_t number, const Status &reason) {
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
  close(*peers_[number]);
  reportLoss(number, reason);
}

void UcxMessenger::disconnect(uint32_t number) {
  if (MessengerPeer *const peer = find(number)) {
    if (peer->remote != 0)
      post(*peer, Kind::bye);
    close(*peer);
  }
  if (number < peers_.size())
    peers_[number].reset();
  std::erase_if(events_, [&](const MessengerEvent &event) { return event.peer == number; });
}

void UcxMessenger::onFailure(void *messenger, ucp_ep_h connection, ucs_status_t status) {
  for (const auto &peer : static_cast<UcxMessenger *>(messenger)->peers_)
    if (peer && peer->connection == connection)
      fail(*peer, status);
}

/// UCX has reported an error of a connection.
void UcxMessenger::fail(MessengerPeer &peer, ucs_status_t status) {
  if (peer.failure.ok())
    peer.failure = failed(std::string("the connection is lost: ") + ucs_status_string(status) +
                          " (UCX); see whether the peer has ended");
}

ucs_status_t UcxMessenger::onStranger(void *messenger, const void *, size_t, void *, size_t,
                                      const ucp_am_recv_param_t *param) {
  ++static_cast<UcxMessenger *>(messenger)->dropped_;
  return param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV ? UCS_ERR_REJECTED : UCS_OK;
}

void UcxMessenger::arrive(const Post &message) {
  const PostHeader header = message.header();
  const std::string_view text = message.text();
  if (header.protocol != kProtocol || header.token != token_) {
    ++dropped_;
    return;
  }
  if (header.kind == Kind::hello) {
    if (hellos_.size() < kMaxHellos && text.size() <= kMaxAddress && header.data != 0)
      hellos_.emplace_back(header, text);
    else
      ++dropped_;
    return;
  }
  const uint32_t number = numberOf(header.connection);
  MessengerPeer *const peer = find(number);
  if (!peer || peer->identity != header.connection) {
    ++dropped_;
    return;
  }
  peer->lastSeen = Clock::now();
  if (header.kind == Kind::data) {
    arriveData(number, header, text);
  } else if (header.kind == Kind::frame) {
    arriveFrame(number, header, text);
  } else if (header.kind == Kind::welcome && peer->remote == 0) {
    peer->remote = header.data;
    peer->remoteAt = header.address;
  } else if (header.kind == Kind::request && peer->outgoing.count(header.data) > 0) {
    peer->outgoing[header.data].requested = true;
  } else if (header.kind == Kind::taken && peer->outgoing.count(header.data) > 0) {
    complete(MessengerEvent::kSent, number, peer->outgoing, header.data);
    tasks_.push_back({peer->identity, Kind::confirmed, header.data});
  } else if (header.kind == Kind::confirmed) {
    const auto found = peer->incoming.find(header.data);
    if (found != peer->incoming.end() && found->second.state == Incoming::kCopied)
      complete(MessengerEvent::kReceived, number, peer->incoming, header.data);
  } else if (header.kind == Kind::bye && peer->failure.ok()) {
    peer->failure = failed("the peer has disconnected");
  } else if (header.kind == Kind::ping) {
    tasks_.push_back({peer->identity, Kind::pong, 0});
  }
}

void UcxMessenger::arriveData(uint32_t number, const PostHeader &header, std::string_view piece) {
  const auto found = peers_[number]->incoming.find(header.data);
  if (found == peers_[number]->incoming.end() || found->second.state != Incoming::kRequested ||
      header.address > found->second.bytes || piece.size() > found->second.bytes - header.address) {
    ++dropped_;
    return;
  }
  Incoming &incoming = found->second;
  std::memcpy(incoming.to + header.address, piece.data(), piece.size());
  incoming.copied += piece.size();
  if (incoming.copied >= incoming.bytes)
    complete(MessengerEvent::kReceived, number, peers_[number]->incoming, header.data);
}

void UcxMessenger::arriveFrame(uint32_t number, const PostHeader &header, std::string_view text) {
  MessengerPeer &peer = *peers_[number];
  const bool known = header.number < peer.admitted || peer.early.count(header.number) > 0;
  if (known || text.size() > kMaxFrameText || (header.bytes > 0 && peer.incoming.count(header.data) > 0)) {
    ++dropped_;
    return;
  }
  if (peer.early.size() >= kMaxEarly || peer.incoming.size() >= kMaxIncoming) {
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

template <class Transfers>
void UcxMessenger::complete(MessengerEvent::Kind kind, uint32_t number, Transfers &transfers, uint64_t data) {
  const auto transfer = transfers.find(data);
  MessengerEvent event;
  event.kind = kind;
  event.peer = number;
  event.token = transfer->second.token;
  event.ok = true;
  events_.push_back(event);
  transfers.erase(transfer);
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
