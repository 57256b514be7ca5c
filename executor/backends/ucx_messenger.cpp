// SPDX-License-Identifier: Apache-2.0
// The messenger of libreshard_ucx.so. Each message is one of UCX with a tag: a header, and a text or a piece of data.
// Data are announced by a frame, and nothing else happens until the receiver asks for them. Inside a host the receiver
// then copies them out of the sender's memory (PeerMemory), and the sender confirms that it has not ended the
// transfer meanwhile. Else the sender copies them into messages, piece by piece. So UCX never accesses the memory of a
// transfer, which is the caller's as soon as a connection is closed. Data are in the memory of the host.
//
// A connection has an identity at each end: a number that the end draws and that the other one writes into each header.
// A message without the identity of a connection that exists is dropped. The first message, a hello, has the identity
// and the address of its sender. The tag of each message is the token of the receiver's address.

#include "executor/interfaces/messenger.h"

#include "base/random.h"
#include "executor/backends/ucx_connection.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <utility>
#include <vector>

namespace reshard::ucx {
namespace {

constexpr uint64_t kMaxPeers = 1 << 20;
constexpr char kProtocol[] = "reshard-frame-1";
constexpr size_t kMaxAddress = 4096;
/// Data are sent in pieces, of which so many are in flight. UCX receives a piece as a whole or not at all.
constexpr uint64_t kPieceBytes = 48 << 10;
constexpr size_t kPieces = 32;
/// The most frames that overtake others, and announced data, of one peer; a peer that exceeds one breaks the protocol.
/// kMaxHellos: the most peers that have said hello and sent no frame yet; further hellos are dropped.
constexpr size_t kMaxEarly = size_t{1} << 14, kMaxIncoming = 2 * kMaxFrames, kMaxHellos = 256;
/// Seconds that the destructor waits until the peers have received the last messages.
constexpr double kCloseSeconds = 0.1;
constexpr auto kWatch = std::chrono::milliseconds(100);
constexpr auto kPing = std::chrono::seconds(1);
constexpr std::chrono::duration<double> kSilent(kUnresponsiveSeconds);

enum class Kind : uint32_t {
  hello,     // `data`: the sender's identity, `address`: where its memory has it; the text: its address
  welcome,   // `data` and `address` as of a hello
  frame,     // with `bytes` of data if that is not 0, at `address` of the sender's memory
  want,      // send data
  data,      // they follow
  taken,     // data were copied out of the sender's memory
  confirmed, // they had not changed
  bye,
  ping,
  pong,
};

/// The header of each message.
struct PostHeader {
  uint64_t connection = 0; // the receiver's identity
  Kind kind{};
  uint32_t unused = 0;
  uint64_t number = 0; // counts frames from 0 on
  uint64_t data = 0;   // number of the data
  uint64_t bytes = 0;
  uint64_t address = 0; // for data: the position of the piece
  Frame frame;
};

/// Data that this process has announced.
struct Outgoing {
  const std::byte *memory = nullptr;
  uint64_t bytes = 0;
  uint64_t token = 0;
  bool wanted = false; // the receiver has asked for messages with the data
  uint64_t sent = 0;
};

/// Data that a peer has announced.
struct Incoming {
  enum State {
    kAnnounced,
    kReads,  // this process copies them
    kCopied, // until they are confirmed
    kWanted, // until the peer has sent them
  };
  State state = kAnnounced;
  std::byte *to = nullptr;
  uint64_t bytes = 0;
  uint64_t token = 0;
  uint64_t from = 0, copied = 0;
};

struct MessengerPeer {
  uint64_t identity = 0; // ours; 0 once the connection has ended. A peer of this host reads it in our memory.
  uint64_t remote = 0;   // the peer's; 0 before it has answered
  uint64_t remoteAt = 0; // its address in the peer's memory
  Connection *connection = nullptr; // null: it has ended, and only events are left
  Status failure;                   // the connection's failure, until it is ended
  bool known = false;               // the caller knows its number
  Clock::time_point lastSeen = Clock::now();
  uint64_t sent = 0, admitted = 0;          // frames
  uint64_t nextData = 1;                    // number
  std::deque<std::string> waiting;          // messages, for the peer's answer
  std::map<uint64_t, MessengerEvent> early; // frames that have overtaken others, by number
  std::map<uint64_t, Outgoing> outgoing;    // by number
  std::map<uint64_t, Incoming> incoming;

  void fail(const Status &reason) {
    if (failure.ok())
      failure = reason;
  }
  /// Whether the connection is as it was made; if not, `failure` says why.
  bool isWhole() {
    if (connection->failure != UCS_OK)
      fail(failed(std::string("the connection is lost: ") + ucs_status_string(connection->failure) +
                  " (UCX); see whether the peer has ended"));
    return failure.ok();
  }
};

class UcxMessenger : public Messenger {
public:
  UcxMessenger() = default;
  UcxMessenger(const UcxMessenger &) = delete;
  UcxMessenger &operator=(const UcxMessenger &) = delete;
  ~UcxMessenger() override;
  Status open();

  const std::string &address() const override { return worker_.address(); }
  Result<uint32_t> connect(std::string_view address) override;
  void disconnect(uint32_t peer) override;
  Status send(uint32_t peer, const Frame &frame, std::string_view text) override;
  Status sendData(uint32_t peer, const Frame &frame, const std::byte *data, uint64_t bytes, uint64_t token) override;
  Status receive(uint32_t peer, uint64_t data, std::byte *to, uint64_t token) override;
  std::optional<MessengerEvent> poll() override;
  bool readsMemory(uint32_t peer) const override;
  bool readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) override;
  uint64_t dropped() const override { return dropped_; }

private:
  /// Makes a peer from its address, with an identity and a UCX connection.
  Result<uint32_t> addPeer(std::string_view address);
  /// A hello has arrived.
  void accept(const PostHeader &header, std::string_view address);
  /// Sends this end's identity.
  void introduce(MessengerPeer &peer, Kind kind, std::string_view text = {});
  /// A peer whose connection has not ended; null if there is none.
  MessengerPeer *find(uint32_t peer) const;
  MessengerPeer *findIdentity(uint64_t identity) const { return find(numberOf(identity)); }
  static uint32_t numberOf(uint64_t identity) { return identity & (kMaxPeers - 1); }
  Status sendFrame(uint32_t peer, PostHeader header, std::string_view text);

  /// Sends a message once the peer has answered.
  void post(MessengerPeer &peer, Kind kind, PostHeader header = {}, std::string_view text = {});
  /// The same, about the data of a number.
  void postData(MessengerPeer &peer, Kind kind, uint64_t data);
  /// Copies wanted data into messages, of which a few are in flight.
  void sendPieces(uint32_t number);

  void progress();
  void progress(uint32_t number);
  void receiveMessages();
  void readPart();
  /// Detects peers that have ended.
  void watch();
  Status watch(MessengerPeer &peer, Clock::time_point now);
  /// Begins to close a connection.
  void close(MessengerPeer &peer);
  /// Tells the caller that a closed connection and its transfers have ended.
  void tell(uint32_t number, const Status &reason);

  /// Called for an active message, which no messenger sends.
  static ucs_status_t onStranger(void *messenger, const void *, size_t, void *, size_t,
                                 const ucp_am_recv_param_t *param);
  void arrive(std::string_view message);
  void arriveData(uint32_t number, const PostHeader &header, std::string_view piece);
  void arriveFrame(uint32_t number, const PostHeader &header, std::string_view text);
  /// Reports that the data of a number are sent or received. `transfers`: the peer's `outgoing` or `incoming`.
  template <class Transfers>
  void complete(MessengerEvent::Kind kind, uint32_t number, Transfers &transfers, uint64_t data);

  Worker worker_;
  std::vector<std::unique_ptr<MessengerPeer>> peers_; // by number; null: free
  std::deque<MessengerEvent> events_;
  std::deque<std::pair<uint64_t, uint64_t>> reading_; // identity and number of data of state kReads
  std::list<Post> arrivals_;                          // posts that UCX receives
  Clock::time_point watched_ = Clock::now();
  uint64_t dropped_ = 0;
};

constexpr uint64_t kMaxMessage = sizeof(PostHeader) + std::max<uint64_t>(kPieceBytes, kMaxAddress);

Status UcxMessenger::open() {
  if (Status status = worker_.open(kProtocol, 64, UCP_FEATURE_TAG | UCP_FEATURE_AM, &onStranger, this); !status.ok())
    return status;
  if (address().size() > kMaxAddress)
    return failed("an address of " + std::to_string(address().size()) + " bytes, expected at most " +
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
  worker_.finish(deadlineIn(kCloseSeconds));
  for (const Post &post : arrivals_)
    ucp_request_free(post.request);
  worker_.close(); // before what it may still access is freed
}

Result<uint32_t> UcxMessenger::addPeer(std::string_view address) {
  if (address.size() <= kGreetingBytes || address.size() > kMaxAddress)
    return invalid("the address of a messenger has " + std::to_string(address.size()) + " bytes, expected " +
                   std::to_string(kGreetingBytes + 1) + " to " + std::to_string(kMaxAddress));
  const auto free = std::find(peers_.begin(), peers_.end(), nullptr);
  const auto number = static_cast<uint32_t>(free - peers_.begin());
  if (number == kMaxPeers)
    return failed("the messenger has " + std::to_string(kMaxPeers) + " connections, which is the most");
  Connection *const connection = worker_.connect(address);
  if (!connection)
    return invalid("the address of a messenger is damaged, or of another version of reshard: expected that it begins "
                   "with '" +
                   std::string(kProtocol) + "'");
  if (free == peers_.end())
    peers_.emplace_back();
  auto peer = std::make_unique<MessengerPeer>();
  peer->identity = (randomNumber() | uint64_t{1} << 63) / kMaxPeers * kMaxPeers + number;
  peer->connection = connection;
  peers_[number] = std::move(peer);
  return number;
}

Result<uint32_t> UcxMessenger::connect(std::string_view address) {
  const Result<uint32_t> number = addPeer(address);
  if (number.ok()) {
    peers_[*number]->known = true;
    introduce(*peers_[*number], Kind::hello, this->address());
  }
  return number;
}

void UcxMessenger::introduce(MessengerPeer &peer, Kind kind, std::string_view text) {
  PostHeader header;
  header.data = peer.identity;
  header.address = reinterpret_cast<uint64_t>(&peer.identity);
  post(peer, kind, header, text);
}

void UcxMessenger::accept(const PostHeader &header, std::string_view address) {
  const bool repeated =
      std::any_of(peers_.begin(), peers_.end(), [&](const auto &each) { return each && each->remote == header.data; });
  const auto strangers =
      std::count_if(peers_.begin(), peers_.end(), [](const auto &each) { return each && !each->known; });
  const bool refused = header.data == 0 || repeated || static_cast<size_t>(strangers) >= kMaxHellos;
  const Result<uint32_t> number = refused ? invalid("a hello is repeated, or one of too many") : addPeer(address);
  if (!number.ok()) {
    ++dropped_;
    return;
  }
  MessengerPeer &peer = *peers_[*number];
  peer.remote = header.data;
  peer.remoteAt = header.address;
  introduce(peer, Kind::welcome);
}

MessengerPeer *UcxMessenger::find(uint32_t peer) const {
  return peer < peers_.size() && peers_[peer] && peers_[peer]->connection ? peers_[peer].get() : nullptr;
}

bool UcxMessenger::readsMemory(uint32_t peer) const {
  const MessengerPeer *const from = find(peer);
  return from && from->connection->memory.isOpen();
}

bool UcxMessenger::readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) {
  // The process may have ended, and another one may have its number.
  return readsMemory(peer) && peers_[peer]->connection->memory.isAlive() &&
         peers_[peer]->connection->memory.read(to, from, bytes);
}

void UcxMessenger::post(MessengerPeer &peer, Kind kind, PostHeader header, std::string_view text) {
  if (!peer.isWhole())
    return;
  header.connection = peer.remote;
  header.kind = kind;
  const std::string_view head(reinterpret_cast<const char *>(&header), sizeof header);
  if (peer.remote == 0 && kind != Kind::hello)
    peer.waiting.emplace_back(head).append(text);
  else
    worker_.post(*peer.connection, head, text);
}

void UcxMessenger::postData(MessengerPeer &peer, Kind kind, uint64_t data) {
  PostHeader header;
  header.data = data;
  post(peer, kind, header);
}

Status UcxMessenger::sendFrame(uint32_t number, PostHeader header, std::string_view text) {
  MessengerPeer *const peer = find(number);
  if (!peer || !peer->isWhole())
    return peer ? peer->failure : failed("the connection is lost");
  if (text.size() > kMaxFrameText)
    return invalid("the text of a frame has " + std::to_string(text.size()) + " bytes, expected at most " +
                   std::to_string(kMaxFrameText));
  if (peer->connection->posts.size() + peer->waiting.size() >= kMaxFrames || peer->outgoing.size() >= kMaxFrames)
    return failed("the peer has not received " + std::to_string(kMaxFrames) + " frames");
  header.number = peer->sent++;
  post(*peer, Kind::frame, header, text);
  return peer->isWhole() ? Status() : peer->failure;
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
  if (!peer || !peer->isWhole())
    return peer ? peer->failure : failed("the connection is lost");
  const auto found = peer->incoming.find(data);
  if (found == peer->incoming.end() || found->second.state != Incoming::kAnnounced)
    return invalid("no data with number " + std::to_string(data) + " wait for receive()");
  Incoming &incoming = found->second;
  incoming.to = to;
  incoming.token = token;
  if (peer->connection->memory.isOpen()) {
    incoming.state = Incoming::kReads;
    reading_.emplace_back(peer->identity, data);
    return {};
  }
  incoming.state = Incoming::kWanted;
  postData(*peer, Kind::want, data);
  return peer->isWhole() ? Status() : peer->failure;
}

void UcxMessenger::sendPieces(uint32_t number) {
  MessengerPeer &peer = *peers_[number];
  const std::list<Post> &posts = peer.connection->posts;
  for (auto each = peer.outgoing.begin(); each != peer.outgoing.end() && posts.size() < kPieces;) {
    const uint64_t data = each->first;
    Outgoing &outgoing = (each++)->second;
    if (!outgoing.wanted)
      continue;
    while (outgoing.sent < outgoing.bytes && posts.size() < kPieces && peer.isWhole()) {
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
  if (!reading_.empty())
    readPart();
  watch();
  for (uint32_t number = 0; number < peers_.size(); ++number)
    if (find(number))
      progress(number);
}

void UcxMessenger::receiveMessages() {
  ucp_tag_recv_info_t info;
  for (int count = 0; count < 64; ++count) {
    const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, 0, 0, 1, &info);
    if (!message)
      break;
    const bool fits =
        info.sender_tag == worker_.token() && info.length >= sizeof(PostHeader) && info.length <= kMaxMessage;
    Post &post = arrivals_.emplace_back();
    post.bytes.resize(fits ? info.length : 0); // else UCX drops the message
    const ucp_request_param_t param{};
    post.request = ucp_tag_msg_recv_nbx(worker_, post.bytes.data(), post.bytes.size(), message, &param);
    if (UCS_PTR_IS_ERR(post.request) || !fits)
      ++dropped_;
    else if (!post.request)
      arrive(post.bytes);
    if (!UCS_PTR_IS_PTR(post.request))
      arrivals_.pop_back();
  }
  std::erase_if(arrivals_, [this](const Post &post) {
    const ucs_status_t status = ucp_request_check_status(post.request);
    if (status == UCS_INPROGRESS)
      return false;
    ucp_request_free(post.request);
    if (status == UCS_OK && !post.bytes.empty())
      arrive(post.bytes);
    return true;
  });
}

void UcxMessenger::progress(uint32_t number) {
  MessengerPeer &peer = *peers_[number];
  for (; !peer.waiting.empty() && peer.remote != 0 && peer.isWhole(); peer.waiting.pop_front()) {
    std::string bytes = std::move(peer.waiting.front());
    std::memcpy(bytes.data() + offsetof(PostHeader, connection), &peer.remote, sizeof peer.remote);
    worker_.post(*peer.connection, bytes);
  }
  sendPieces(number);
  if (!peer.isWhole()) {
    close(peer);
    tell(number, Status(peer.failure));
  }
}

void UcxMessenger::readPart() {
  const auto [identity, data] = reading_.front();
  reading_.pop_front();
  MessengerPeer *const peer = findIdentity(identity);
  if (!peer || peer->identity != identity)
    return;
  Incoming &incoming = peer->incoming.at(data);
  const bool read = peer->connection->memory.readPart(incoming.to, incoming.from, incoming.bytes, incoming.copied);
  if (read && incoming.copied < incoming.bytes) {
    reading_.emplace_front(identity, data);
    return;
  }
  incoming.state = read ? Incoming::kCopied : Incoming::kWanted;
  incoming.copied = 0; // counts the pieces
  postData(*peer, read ? Kind::taken : Kind::want, data);
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
    if (peer && peer->isWhole())
      peer->failure = watch(*peer, now);
  }
}

Status UcxMessenger::watch(MessengerPeer &peer, Clock::time_point now) {
  const bool silent = now - peer.lastSeen > kSilent;
  const std::string text = " for " + std::to_string(static_cast<int>(kUnresponsiveSeconds)) + " s";
  if (!peer.known && silent)
    return failed("the peer has sent no frame" + text);
  const PeerMemory &memory = peer.connection->memory;
  if (memory.isOpen()) {
    if (!memory.isAlive())
      return failed("the process of the peer has ended");
    uint64_t found = 0;
    if (peer.remote == 0)
      return silent ? failed("the peer has not answered" + text) : Status();
    if (!memory.read(reinterpret_cast<std::byte *>(&found), peer.remoteAt, sizeof found) || found != peer.remote)
      return failed("the peer has disconnected");
    return {};
  }
  if (silent)
    return failed("the peer has been silent" + text + ": it is stopped, or the network is cut");
  if (peer.remote != 0 && peer.connection->pingIsDue(kPing))
    post(peer, Kind::ping);
  return {};
}

void UcxMessenger::close(MessengerPeer &peer) {
  peer.identity = 0;
  worker_.disconnect(*std::exchange(peer.connection, nullptr), peer.remote == 0); // then only a hello was sent
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

ucs_status_t UcxMessenger::onStranger(void *messenger, const void *, size_t, void *, size_t,
                                      const ucp_am_recv_param_t *param) {
  ++static_cast<UcxMessenger *>(messenger)->dropped_;
  return param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV ? UCS_ERR_REJECTED : UCS_OK;
}

void UcxMessenger::arrive(std::string_view message) {
  PostHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  const std::string_view text = message.substr(sizeof header);
  if (header.kind == Kind::hello) {
    accept(header, text);
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
  } else if (header.kind == Kind::want && peer->outgoing.count(header.data) > 0) {
    peer->outgoing[header.data].wanted = true;
  } else if (header.kind == Kind::taken && peer->outgoing.count(header.data) > 0) {
    complete(MessengerEvent::kSent, number, peer->outgoing, header.data);
    postData(*peer, Kind::confirmed, header.data);
  } else if (header.kind == Kind::confirmed) {
    const auto found = peer->incoming.find(header.data);
    if (found != peer->incoming.end() && found->second.state == Incoming::kCopied)
      complete(MessengerEvent::kReceived, number, peer->incoming, header.data);
  } else if (header.kind == Kind::bye) {
    peer->fail(failed("the peer has disconnected"));
  } else if (header.kind == Kind::ping && !peer->connection->isFull()) {
    post(*peer, Kind::pong);
  }
}

void UcxMessenger::arriveData(uint32_t number, const PostHeader &header, std::string_view piece) {
  const auto found = peers_[number]->incoming.find(header.data);
  if (found == peers_[number]->incoming.end() || found->second.state != Incoming::kWanted ||
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
    peer.fail(failed("the peer breaks the protocol: it sends too much at once"));
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

} // namespace
} // namespace reshard::ucx

extern "C" {

extern const uint32_t reshard_open_messenger_version = reshard::kMessengerVersion;

reshard::Messenger *reshard_open_messenger(reshard::Status &error) {
  auto messenger = std::make_unique<reshard::ucx::UcxMessenger>();
  error = messenger->open();
  return error.ok() ? messenger.release() : nullptr;
}
}
