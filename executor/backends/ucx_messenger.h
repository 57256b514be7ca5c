// SPDX-License-Identifier: Apache-2.0
// The messenger of libreshard_ucx.so. Each message is one of UCX with a tag: a header, and a text or a piece of data.
// Data are announced by a frame, and nothing else happens until the receiver asks for them. Inside a host the receiver
// then copies them out of the sender's memory (peer_memory.h), and the sender confirms that it has not ended the
// transfer meanwhile. Else the sender copies them into messages, piece by piece. So UCX never accesses the memory of a
// transfer, which is the caller's as soon as a connection is closed. Data are in the memory of the host.
//
// A connection has an identity at each end: a number that the end draws and that the other one writes into each header.
// A message without the identity of a connection that exists is dropped. Each end sends over a UCX connection of its
// own. The first message, a hello, has the identity and the address of its sender, and the token of the
// receiver's address: a messenger that was closed and another one at the same port differ by it.
#pragma once

#include "executor/backends/peer_memory.h"
#include "executor/backends/ucx_worker.h"
#include "executor/interfaces/messenger.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

namespace reshard::ucx {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMaxPeers = 1 << 20;

enum class Kind : uint32_t {
  hello,     // `data`: the sender's identity, `address`: where its memory has it; the text: its address
  welcome,   // `data` and `address` as of a hello
  frame,     // with `bytes` of data if that is not 0, at `address` of the sender's memory
  request,   // asks for data
  data,      // they follow
  taken,     // data were copied out of the sender's memory
  confirmed, // they had not changed
  bye,
  ping,
  pong,
};

/// The header of each message.
struct PostHeader {
  uint64_t protocol = 0;
  uint64_t token = 0;      // the token in the receiver's address
  uint64_t connection = 0; // the receiver's identity
  Kind kind{};
  uint32_t unused = 0;
  uint64_t number = 0; // counts the frames, from 0 on
  uint64_t data = 0;   // number of the data
  uint64_t bytes = 0;
  uint64_t address = 0; // for data: the position of the piece
  Frame frame;
};

/// A message that is being sent or received: a header, and its text. UCX may access it until the request is complete.
struct Post {
  std::string bytes;
  void *request = nullptr;

  PostHeader header() const {
    PostHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    return header;
  }
  std::string_view text() const { return std::string_view(bytes).substr(sizeof(PostHeader)); }
};

/// Data that this process has announced.
struct Outgoing {
  const std::byte *memory = nullptr;
  uint64_t bytes = 0;
  uint64_t token = 0;
  bool requested = false; // the receiver has asked for messages with the data
  uint64_t sent = 0;
};

/// Data that a peer has announced.
struct Incoming {
  enum State {
    kAnnounced,
    kReads,     // this process copies them
    kCopied,    // until they are confirmed
    kRequested, // until the peer has sent them
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
  uint64_t token = 0;    // the token in the peer's address
  ucp_ep_h connection = nullptr;
  PeerMemory memory;
  Status failure;     // why the connection has failed, until it is ended
  bool ended = false; // only its events are left
  bool known = false; // the caller knows its number
  Clock::time_point lastSeen, pinged;
  uint64_t sent = 0, admitted = 0;           // frames
  uint64_t nextData = 1;                     // number
  std::deque<std::unique_ptr<Post>> waiting; // for the peer's answer
  std::deque<std::unique_ptr<Post>> posts;   // UCX sends these
  std::map<uint64_t, MessengerEvent> early;  // frames that have overtaken others, by number
  std::map<uint64_t, Outgoing> outgoing;     // by number
  std::map<uint64_t, Incoming> incoming;
};

/// A message that answers one which has arrived.
struct PendingPost {
  uint64_t identity; // the peer's
  Kind kind;         // the kind of the message to be sent
  uint64_t data;
};

class UcxMessenger : public Messenger {
public:
  UcxMessenger() = default;
  UcxMessenger(const UcxMessenger &) = delete;
  UcxMessenger &operator=(const UcxMessenger &) = delete;
  ~UcxMessenger() override;
  Status open();

  const std::string &address() const override { return address_; }
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
  void accept(const PostHeader &header, const std::string &address);
  /// A peer whose connection has not ended; null if there is none.
  MessengerPeer *find(uint32_t peer) const;
  MessengerPeer *findIdentity(uint64_t identity) const { return find(numberOf(identity)); }
  static uint32_t numberOf(uint64_t identity) { return identity & (kMaxPeers - 1); }
  Status sendFrame(uint32_t peer, PostHeader header, std::string_view text);

  /// Sends a message once the peer has answered.
  void post(MessengerPeer &peer, Kind kind, PostHeader header = {}, std::string_view text = {});
  void start(MessengerPeer &peer, std::unique_ptr<Post> post);
  /// Copies requested data into messages, of which a few are in flight.
  void sendPieces(uint32_t number);

  void progress();
  void progress(uint32_t number);
  void receiveMessages();
  void readPart();
  /// Detects peers that have ended.
  void watch();
  Status watch(MessengerPeer &peer, Clock::time_point now);
  /// Ends a connection and its transfers. If `reason` is an error, the caller is told.
  void end(uint32_t number, const Status &reason);
  /// Begins to close a UCX connection.
  void close(MessengerPeer &peer);
  void reportLoss(uint32_t number, const Status &reason);

  // None of these calls a function of UCX.
  static void onFailure(void *messenger, ucp_ep_h connection, ucs_status_t status);
  static void fail(MessengerPeer &peer, ucs_status_t status);
  /// Receives active messages, which no messenger sends.
  static ucs_status_t onStranger(void *messenger, const void *, size_t, void *, size_t,
                                 const ucp_am_recv_param_t *param);
  void arrive(const Post &message);
  void arriveData(uint32_t number, const PostHeader &header, std::string_view piece);
  void arriveFrame(uint32_t number, const PostHeader &header, std::string_view text);
  /// Reports that the data of a number are sent or received. `transfers`: the peer's `outgoing` or `incoming`.
  template <class Transfers>
  void complete(MessengerEvent::Kind kind, uint32_t number, Transfers &transfers, uint64_t data);

  Worker worker_;
  std::string address_;
  uint64_t token_ = 0;
  std::vector<std::unique_ptr<MessengerPeer>> peers_; // by number; null: free
  std::deque<MessengerEvent> events_;
  std::vector<std::pair<PostHeader, std::string>> hellos_;
  std::deque<std::pair<uint64_t, uint64_t>> reading_; // identity and number of data of state kReads
  std::vector<PendingPost> tasks_;
  std::vector<std::unique_ptr<Post>> ended_;    // posts of ended connections
  std::vector<std::unique_ptr<Post>> arrivals_; // UCX receives into these
  Clock::time_point watched_ = Clock::now();
  uint64_t dropped_ = 0;
};

} // namespace reshard::ucx
