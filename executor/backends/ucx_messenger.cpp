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
  Frame frame = {};
};

constexpr uint64_t kMaxMessage = sizeof(PostHeader) + std::max<uint64_t>(kPieceBytes, kMaxAddress);

/// The events of a messenger about one of its peers.
struct PeerEvents {
  std::deque<MessengerEvent> &all;
  uint32_t peer;

  /// Reports the end of a transfer, or of the connection.
  void add(MessengerEvent::Kind kind, uint64_t token, bool ok, Status reason = {}) {
    MessengerEvent event;
    event.kind = kind;
    event.peer = peer;
    event.token = token;
    event.ok = ok;
    event.reason = std::move(reason);
    all.push_back(std::move(event));
  }
};

/// This end of the connection to a peer: the handshake, what is sent, and whether the peer is lost.
class MessengerLink {
public:
  MessengerLink(Worker &worker, Connection &connection, uint64_t identity)
      : worker_(worker), connection_(&connection), identity_(identity) {}
  MessengerLink(const MessengerLink &) = delete;
  MessengerLink &operator=(const MessengerLink &) = delete;

  uint64_t identity() const { return identity_; }
  uint64_t remote() const { return remote_; }
  bool isOpen() const { return connection_ != nullptr; }

  // The functions below are for an open link.
  const PeerMemory &memory() const { return connection_->memory; }
  /// The number of messages that are in flight, and of those that also wait for the peer's answer.
  size_t inFlight() const { return connection_->posts.size(); }
  size_t unsent() const { return inFlight() + waiting_.size(); }
  bool isFull() const { return connection_->isFull(); }
  void fail(Status reason) {
    if (failure_.ok())
      failure_ = std::move(reason);
  }
  /// Success, or why the connection is lost.
  const Status &status() {
    if (failure_.ok() && connection_->failure != UCS_OK)
      failure_ = failed(std::string("the connection is lost: ") + ucs_status_string(connection_->failure) +
                        " (UCX); see whether the peer has ended");
    return failure_;
  }

  /// Sends this end's identity.
  void introduce(Kind kind, std::string_view text = {}) {
    post(kind, {.data = identity_, .address = reinterpret_cast<uint64_t>(&identity_)}, text);
  }
  /// The peer's identity has arrived.
  void introduced(const PostHeader &header) {
    remote_ = header.data;
    remoteAt_ = header.address;
  }
  /// Sends a message once the peer has answered.
  void post(Kind kind, PostHeader header = {}, std::string_view text = {}) {
    if (!status().ok())
      return;
    header.connection = remote_;
    header.kind = kind;
    const std::string_view head(reinterpret_cast<const char *>(&header), sizeof header);
    if (remote_ == 0 && kind != Kind::hello)
      waiting_.emplace_back(head).append(text);
    else
      worker_.post(*connection_, head, text);
  }
  /// Sends the messages that have waited for the answer.
  void sendWaiting() {
    for (; !waiting_.empty() && remote_ != 0 && status().ok(); waiting_.pop_front()) {
      std::string bytes = std::move(waiting_.front());
      std::memcpy(bytes.data() + offsetof(PostHeader, connection), &remote_, sizeof remote_);
      worker_.post(*connection_, bytes);
    }
  }

  /// A message has arrived, or this process could not receive any.
  void seen(Clock::time_point now) { lastSeen_ = now; }
  /// Detects that the peer has ended. `known`: the caller knows the peer.
  void watch(Clock::time_point now, bool known) {
    if (!status().ok())
      return;
    const bool silent = now - lastSeen_ > kSilent;
    const std::string text = " for " + std::to_string(static_cast<int>(kUnresponsiveSeconds)) + " s";
    uint64_t found = 0;
    if (!known && silent) {
      fail(failed("the peer has sent no frame" + text));
    } else if (memory().isOpen() && !memory().isAlive()) {
      fail(failed("the process of the peer has ended"));
    } else if (memory().isOpen() && remote_ == 0) {
      if (silent)
        fail(failed("the peer has not answered" + text));
    } else if (memory().isOpen()) {
      if (!memory().read(reinterpret_cast<std::byte *>(&found), remoteAt_, sizeof found) || found != remote_)
        fail(failed("the peer has disconnected"));
    } else if (silent) {
      fail(failed("the peer has been silent" + text + ": it is stopped, or the network is cut"));
    } else if (remote_ != 0 && connection_->pingIsDue(kPing)) {
      post(Kind::ping);
    }
  }
  /// Begins to close the connection.
  void close() {
    identity_ = 0;
    worker_.disconnect(*std::exchange(connection_, nullptr), remote_ == 0); // then only a hello was sent
  }

private:
  Worker &worker_;
  Connection *connection_; // null: it has ended
  uint64_t identity_;      // ours; 0 once the connection has ended. A peer of this host reads it in our memory.
  uint64_t remote_ = 0;    // the peer's; 0 before it has answered
  uint64_t remoteAt_ = 0;  // its address in the peer's memory
  Status failure_;
  Clock::time_point lastSeen_ = Clock::now();
  std::deque<std::string> waiting_; // messages, for the peer's answer
};

/// The frames of a peer, which may overtake each other, in the order in which it has sent them.
class FrameOrder {
public:
  bool has(uint64_t number) const { return number < admitted_ || early_.count(number) > 0; }
  bool isFull() const { return early_.size() >= kMaxEarly; }
  /// Stores a frame, and moves those that are next to `events`. Returns whether the first one of the peer was there.
  bool add(uint64_t number, MessengerEvent frame, std::deque<MessengerEvent> &events) {
    early_[number] = std::move(frame);
    for (auto next = early_.begin(); next != early_.end() && next->first == admitted_; next = early_.erase(next)) {
      events.push_back(std::move(next->second));
      ++admitted_;
    }
    return admitted_ > 0;
  }

private:
  uint64_t admitted_ = 0;
  std::map<uint64_t, MessengerEvent> early_; // frames that have overtaken others, by number
};

/// Data that this process has announced to a peer, until they are sent, or the peer has copied them.
class OutgoingData {
public:
  /// The number of the next data.
  uint64_t next() const { return next_; }
  bool isFull() const { return transfers_.size() >= kMaxFrames; }
  void add(const std::byte *memory, uint64_t bytes, uint64_t token) { transfers_[next_++] = {memory, bytes, token}; }
  /// The peer has asked for messages with the data.
  void want(uint64_t data) {
    if (const auto found = transfers_.find(data); found != transfers_.end())
      found->second.wanted = true;
  }
  /// Copies wanted data into messages, of which a few are in flight.
  void send(MessengerLink &link, PeerEvents events) {
    for (auto next = transfers_.begin(); next != transfers_.end() && link.inFlight() < kPieces;) {
      auto &[data, transfer] = *next++;
      if (!transfer.wanted)
        continue;
      while (transfer.sent < transfer.bytes && link.inFlight() < kPieces && link.status().ok()) {
        const uint64_t bytes = std::min(kPieceBytes, transfer.bytes - transfer.sent);
        const auto *const piece = reinterpret_cast<const char *>(transfer.memory + transfer.sent);
        link.post(Kind::data, {.data = data, .address = transfer.sent}, {piece, bytes});
        transfer.sent += bytes;
      }
      if (transfer.sent == transfer.bytes)
        complete(data, events);
    }
  }
  /// Ends a transfer. Returns whether it was in progress, so that the data have not changed before.
  bool complete(uint64_t data, PeerEvents events) {
    const auto found = transfers_.find(data);
    if (found == transfers_.end())
      return false;
    events.add(MessengerEvent::kSent, found->second.token, true);
    transfers_.erase(found);
    return true;
  }
  void end(PeerEvents events) {
    for (const auto &[data, transfer] : std::exchange(transfers_, {}))
      events.add(MessengerEvent::kSent, transfer.token, false);
  }

private:
  struct Transfer {
    const std::byte *memory = nullptr;
    uint64_t bytes = 0, token = 0;
    bool wanted = false;
    uint64_t sent = 0;
  };
  uint64_t next_ = 1;
  std::map<uint64_t, Transfer> transfers_; // by number
};

/// Data that a peer has announced, until they have arrived.
class IncomingData {
public:
  bool has(uint64_t data) const { return transfers_.count(data) > 0; }
  bool isFull() const { return transfers_.size() >= kMaxIncoming; }
  /// `from`: their address in the peer's memory.
  void add(uint64_t data, uint64_t bytes, uint64_t from) { transfers_[data] = {.bytes = bytes, .from = from}; }
  /// Receives data into memory. The caller then calls readPart(), if this process can read the peer's memory.
  Status begin(MessengerLink &link, uint64_t data, std::byte *to, uint64_t token) {
    const auto found = find(data, kAnnounced);
    if (found == transfers_.end())
      return invalid("no data with number " + std::to_string(data) + " wait for receive()");
    found->second.state = link.memory().isOpen() ? kReads : kWanted;
    found->second.to = to;
    found->second.token = token;
    if (found->second.state == kWanted)
      link.post(Kind::want, {.data = data});
    return link.status();
  }
  /// Copies the next part of data out of the peer's memory. Returns whether there is more to copy.
  bool readPart(MessengerLink &link, uint64_t data) {
    Transfer &transfer = transfers_.at(data);
    const bool read = link.memory().readPart(transfer.to, transfer.from, transfer.bytes, transfer.copied);
    if (read && transfer.copied < transfer.bytes)
      return true;
    transfer.state = read ? kCopied : kWanted;
    transfer.copied = 0; // counts the pieces
    link.post(read ? Kind::taken : Kind::want, {.data = data});
    return false;
  }
  /// A piece of data has arrived. Returns whether this process wants it.
  bool arrive(uint64_t data, uint64_t offset, std::string_view piece, PeerEvents events) {
    const auto found = find(data, kWanted);
    if (found == transfers_.end() || offset > found->second.bytes || piece.size() > found->second.bytes - offset)
      return false;
    std::memcpy(found->second.to + offset, piece.data(), piece.size());
    found->second.copied += piece.size();
    if (found->second.copied >= found->second.bytes)
      complete(found, events);
    return true;
  }
  /// The peer has not changed the data that this process has copied.
  void confirmed(uint64_t data, PeerEvents events) {
    if (const auto found = find(data, kCopied); found != transfers_.end())
      complete(found, events);
  }
  void end(PeerEvents events) {
    for (const auto &[data, transfer] : std::exchange(transfers_, {}))
      if (transfer.state != kAnnounced)
        events.add(MessengerEvent::kReceived, transfer.token, false);
  }

private:
  enum State {
    kAnnounced,
    kReads,  // this process copies them
    kCopied, // until they are confirmed
    kWanted, // until the peer has sent them
  };
  struct Transfer {
    State state = kAnnounced;
    std::byte *to = nullptr;
    uint64_t bytes = 0, from = 0, token = 0;
    uint64_t copied = 0;
  };
  using Transfers = std::map<uint64_t, Transfer>; // by number

  /// The data of a number, if they are in this state.
  Transfers::iterator find(uint64_t data, State state) {
    const auto found = transfers_.find(data);
    return found != transfers_.end() && found->second.state == state ? found : transfers_.end();
  }
  void complete(Transfers::iterator transfer, PeerEvents events) {
    events.add(MessengerEvent::kReceived, transfer->second.token, true);
    transfers_.erase(transfer);
  }

  Transfers transfers_;
};

/// A peer, from its hello to the last event about it.
struct MessengerPeer {
  MessengerPeer(Worker &worker, Connection &connection, uint64_t identity, PeerEvents eventsOfPeer)
      : link(worker, connection, identity), events(eventsOfPeer) {}

  /// Sends a frame. The connection is not known to be lost.
  Status send(PostHeader header, std::string_view text = {}) {
    if (text.size() > kMaxFrameText)
      return invalid("the text of a frame has " + std::to_string(text.size()) + " bytes, expected at most " +
                     std::to_string(kMaxFrameText));
    if (link.unsent() >= kMaxFrames || outgoing.isFull())
      return failed("the peer has not received " + std::to_string(kMaxFrames) + " frames");
    header.number = sent++;
    link.post(Kind::frame, header, text);
    return link.status();
  }
  /// A message of this connection has arrived. Returns whether it fits; else it is dropped.
  bool arrive(const PostHeader &header, std::string_view text) {
    link.seen(Clock::now());
    if (header.kind == Kind::data)
      return incoming.arrive(header.data, header.address, text, events);
    if (header.kind == Kind::frame)
      return arriveFrame(header, text);
    if (header.kind == Kind::welcome && link.remote() == 0)
      link.introduced(header);
    else if (header.kind == Kind::want)
      outgoing.want(header.data);
    else if (header.kind == Kind::taken && outgoing.complete(header.data, events))
      link.post(Kind::confirmed, {.data = header.data});
    else if (header.kind == Kind::confirmed)
      incoming.confirmed(header.data, events);
    else if (header.kind == Kind::bye)
      link.fail(failed("the peer has disconnected"));
    else if (header.kind == Kind::ping && !link.isFull())
      link.post(Kind::pong);
    return true;
  }
  bool arriveFrame(const PostHeader &header, std::string_view text) {
    if (arrived.has(header.number) || text.size() > kMaxFrameText || (header.bytes > 0 && incoming.has(header.data)))
      return false;
    if (arrived.isFull() || incoming.isFull()) {
      link.fail(failed("the peer breaks the protocol: it sends too much at once"));
      return true;
    }
    MessengerEvent event;
    event.peer = events.peer;
    event.frame = header.frame;
    event.text = text;
    event.dataBytes = header.bytes;
    event.data = header.bytes > 0 ? header.data : 0;
    if (header.bytes > 0)
      incoming.add(header.data, header.bytes, header.address);
    known = arrived.add(header.number, std::move(event), events.all) || known;
    return true;
  }
  /// Closes a connection that is lost, and reports that it and its transfers have ended. Returns whether the caller
  /// knows the peer.
  bool end() {
    Status reason = link.status();
    link.close();
    outgoing.end(events);
    incoming.end(events);
    if (known)
      events.add(MessengerEvent::kLost, 0, false, std::move(reason));
    return known;
  }

  MessengerLink link;
  PeerEvents events;
  bool known = false; // the caller knows its number
  uint64_t sent = 0;  // frames
  FrameOrder arrived;
  OutgoingData outgoing;
  IncomingData incoming;
};

class UcxMessenger : public Messenger {
public:
  UcxMessenger() = default;
  UcxMessenger(const UcxMessenger &) = delete;
  UcxMessenger &operator=(const UcxMessenger &) = delete;
  ~UcxMessenger() override {
    for (uint32_t number = 0; number < peers_.size(); ++number)
      disconnect(number);
    worker_.finish(deadlineIn(kCloseSeconds));
    for (const Post &post : arrivals_)
      ucp_request_free(post.request);
    worker_.close(); // before what it may still access is freed
  }
  Status open() {
    if (Status status = worker_.open(kProtocol, 64, UCP_FEATURE_TAG | UCP_FEATURE_AM, &onStranger, this); !status.ok())
      return status;
    if (address().size() > kMaxAddress)
      return failed("an address of " + std::to_string(address().size()) + " bytes, expected at most " +
                    std::to_string(kMaxAddress) + ": choose fewer network devices by UCX_NET_DEVICES");
    return {};
  }

  const std::string &address() const override { return worker_.address(); }
  Result<uint32_t> connect(std::string_view address) override {
    const Result<uint32_t> number = addPeer(address);
    if (number.ok()) {
      peers_[*number]->known = true;
      peers_[*number]->link.introduce(Kind::hello, this->address());
    }
    return number;
  }
  void disconnect(uint32_t number) override {
    if (MessengerPeer *const peer = find(number)) {
      if (peer->link.remote() != 0)
        peer->link.post(Kind::bye);
      peer->link.close();
    }
    if (number < peers_.size())
      peers_[number].reset();
    std::erase_if(events_, [&](const MessengerEvent &event) { return event.peer == number; });
  }
  Status send(uint32_t number, const Frame &frame, std::string_view text) override {
    const Result<MessengerPeer *> peer = usable(number);
    return peer.ok() ? (*peer)->send({.frame = frame}, text) : peer.status();
  }
  Status sendData(uint32_t number, const Frame &frame, const std::byte *data, uint64_t bytes, uint64_t token) override {
    if (bytes == 0)
      return invalid("no data; expected at least one byte");
    const Result<MessengerPeer *> peer = usable(number);
    if (!peer.ok())
      return peer.status();
    OutgoingData &outgoing = (*peer)->outgoing;
    Status status = (*peer)->send(
        {.data = outgoing.next(), .bytes = bytes, .address = reinterpret_cast<uint64_t>(data), .frame = frame});
    if (status.ok())
      outgoing.add(data, bytes, token);
    return status;
  }
  Status receive(uint32_t number, uint64_t data, std::byte *to, uint64_t token) override {
    const Result<MessengerPeer *> peer = usable(number);
    if (!peer.ok())
      return peer.status();
    MessengerLink &link = (*peer)->link;
    Status status = (*peer)->incoming.begin(link, data, to, token);
    if (status.ok() && link.memory().isOpen())
      reading_.emplace_back(link.identity(), data);
    return status;
  }
  std::optional<MessengerEvent> poll() override {
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
  bool readsMemory(uint32_t peer) const override {
    const MessengerPeer *const from = find(peer);
    return from && from->link.memory().isOpen();
  }
  bool readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) override {
    // The process may have ended, and another one may have its number.
    return readsMemory(peer) && peers_[peer]->link.memory().isAlive() &&
           peers_[peer]->link.memory().read(to, from, bytes);
  }
  uint64_t dropped() const override { return dropped_; }

private:
  /// Makes a peer from its address, with an identity and a UCX connection.
  Result<uint32_t> addPeer(std::string_view address) {
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
    const uint64_t identity = (randomNumber() | uint64_t{1} << 63) / kMaxPeers * kMaxPeers + number;
    peers_[number] = std::make_unique<MessengerPeer>(worker_, *connection, identity, PeerEvents{events_, number});
    return number;
  }
  /// A peer whose connection has not ended; null if there is none.
  MessengerPeer *find(uint32_t peer) const {
    return peer < peers_.size() && peers_[peer] && peers_[peer]->link.isOpen() ? peers_[peer].get() : nullptr;
  }
  /// The same, by the identity of this end.
  MessengerPeer *findIdentity(uint64_t identity) const {
    MessengerPeer *const peer = find(identity & (kMaxPeers - 1));
    return peer && peer->link.identity() == identity ? peer : nullptr;
  }
  /// A peer whose connection is not known to be lost.
  Result<MessengerPeer *> usable(uint32_t peer) const {
    MessengerPeer *const found = find(peer);
    if (!found)
      return failed("the connection is lost");
    if (!found->link.status().ok())
      return found->link.status();
    return found;
  }

  void progress() {
    worker_.progress();
    receiveMessages();
    if (!reading_.empty())
      readPart();
    watch();
    for (uint32_t number = 0; number < peers_.size(); ++number)
      if (MessengerPeer *const peer = find(number)) {
        peer->link.sendWaiting();
        peer->outgoing.send(peer->link, peer->events);
        if (!peer->link.status().ok() && !peer->end())
          peers_[number].reset();
      }
  }
  void receiveMessages() {
    const auto ended = [this](Post &post) {
      const std::optional<ucs_status_t> result = resultOf(post.request);
      if (result == UCS_OK && !post.bytes.empty())
        dropped_ += !arrive(post.bytes);
      return result.has_value();
    };
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
      dropped_ += !fits || UCS_PTR_IS_ERR(post.request);
      if (ended(post))
        arrivals_.pop_back();
    }
    std::erase_if(arrivals_, ended);
  }
  void readPart() {
    const auto [identity, data] = reading_.front();
    MessengerPeer *const peer = findIdentity(identity);
    if (!peer || !peer->incoming.readPart(peer->link, data))
      reading_.pop_front();
  }
  /// Detects peers that have ended.
  void watch() {
    const Clock::time_point now = Clock::now();
    if (now - watched_ < kWatch)
      return;
    const bool paused = now - std::exchange(watched_, now) > kPing; // this process did not run, so it received nothing
    for (uint32_t number = 0; number < peers_.size(); ++number)
      if (MessengerPeer *const peer = find(number)) {
        if (paused)
          peer->link.seen(now);
        peer->link.watch(now, peer->known);
      }
  }

  /// Called for an active message, which no messenger sends.
  static ucs_status_t onStranger(void *messenger, const void *, size_t, void *, size_t,
                                 const ucp_am_recv_param_t *param) {
    ++static_cast<UcxMessenger *>(messenger)->dropped_;
    return param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV ? UCS_ERR_REJECTED : UCS_OK;
  }
  /// A message has arrived. Returns whether it fits; else it is dropped.
  bool arrive(std::string_view message) {
    PostHeader header;
    std::memcpy(&header, message.data(), sizeof header);
    message.remove_prefix(sizeof header);
    if (header.kind == Kind::hello)
      return accept(header, message);
    MessengerPeer *const peer = findIdentity(header.connection);
    return peer && peer->arrive(header, message);
  }
  /// A hello has arrived; the same.
  bool accept(const PostHeader &header, std::string_view address) {
    const auto repeated = [&](const auto &peer) { return peer && peer->link.remote() == header.data; };
    const auto stranger = [](const auto &peer) { return peer && !peer->known; };
    if (header.data == 0 || std::any_of(peers_.begin(), peers_.end(), repeated) ||
        static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), stranger)) >= kMaxHellos)
      return false;
    const Result<uint32_t> number = addPeer(address);
    if (!number.ok())
      return false;
    peers_[*number]->link.introduced(header);
    peers_[*number]->link.introduce(Kind::welcome);
    return true;
  }

  Worker worker_;
  std::vector<std::unique_ptr<MessengerPeer>> peers_; // by number; null: free
  std::deque<MessengerEvent> events_;
  std::deque<std::pair<uint64_t, uint64_t>> reading_; // identity and number of data that this process copies
  std::list<Post> arrivals_;                          // posts that UCX receives
  Clock::time_point watched_ = Clock::now();
  uint64_t dropped_ = 0;
};

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
