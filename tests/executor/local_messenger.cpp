// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/local_messenger.h"

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace reshard::tests {
namespace {

using Clock = std::chrono::steady_clock;
constexpr char kScheme[] = "local:";

/// Copies as process_vm_readv does: the owner of the memory may write at the same time, and ThreadSanitizer must not
/// report it.
__attribute__((no_sanitize("thread"))) void copyAsAnotherProcess(std::byte *to, uint64_t from, uint64_t bytes) {
  const auto *source = reinterpret_cast<const volatile std::byte *>(from); // NOLINT(performance-no-int-to-ptr)
  for (uint64_t i = 0; i < bytes; ++i)
    to[i] = source[i];
}

struct Node;

struct Transfer {
  int sender; // side of the connection
  const std::byte *data;
  uint64_t bytes;
  uint64_t token;
  std::byte *to = nullptr; // set by receive()
  uint64_t receiveToken = 0;
};

/// Between two nodes. Side 0 has called connect().
struct Connection {
  Node *ends[2] = {}; // null: this side has ended it
  std::optional<uint32_t> numbers[2];
  std::map<uint64_t, Transfer> transfers;
  uint64_t nextTransfer = 1;
  bool lost[2] = {};     // this side is told, or will be
  size_t unread[2] = {}; // frames to this side that poll() has not returned
};
using Shared = std::shared_ptr<Connection>;

struct Delivery {
  Clock::time_point due;
  Shared connection;
  int side = 0; // that gets it
  MessengerEvent event;
  uint64_t transfer = 0; // of kReceived: bytes to be copied
};

struct Node {
  std::string address, host;
  bool frozen = false, dead = false, cut = false;
  uint64_t served = 0;
  std::chrono::duration<double> delay{0};
  std::deque<Delivery> inbox;
  std::vector<std::pair<Shared, int>> links; // by peer number, with this node's side; null: the number is free
  std::vector<Shared> unmet;                 // of which it is side 1 and has received nothing yet: without a number

  /// All connections, with this node's side.
  std::vector<std::pair<Shared, int>> connections() const {
    std::vector<std::pair<Shared, int>> all;
    for (const auto &link : links)
      if (link.first)
        all.push_back(link);
    for (const Shared &connection : unmet)
      all.emplace_back(connection, 1);
    return all;
  }
};

} // namespace

struct LocalNetwork::State {
  std::mutex mutex;
  std::map<std::string, Node *> nodes;
  uint64_t nextAddress = 1;

  static void push(Node &node, const Shared &connection, int side, MessengerEvent event, uint64_t transfer = 0) {
    const auto due = Clock::now() + std::chrono::duration_cast<Clock::duration>(node.delay);
    node.inbox.push_back({due, connection, side, std::move(event), transfer});
  }

  /// Removes a side's transfers and events, and frees its number.
  static void forget(const Shared &connection, int side) {
    Node &node = *connection->ends[side];
    std::erase_if(node.inbox, [&](const Delivery &each) { return each.connection == connection && each.side == side; });
    if (connection->numbers[side])
      node.links[*connection->numbers[side]] = {};
    else
      std::erase(node.unmet, connection);
    connection->ends[side] = nullptr;
  }

  /// Tells a side that the connection is lost.
  static void lose(const Shared &connection, int side, const std::string &why, bool dropFrames) {
    if (!connection->ends[side] || std::exchange(connection->lost[side], true))
      return;
    Node &node = *connection->ends[side];
    std::erase_if(node.inbox, [&](const Delivery &each) {
      return each.connection == connection && each.side == side &&
             (dropFrames || each.event.kind == MessengerEvent::kReceived);
    });
    for (const auto &[number, transfer] : connection->transfers) {
      MessengerEvent event;
      event.ok = false;
      event.kind = transfer.sender == side ? MessengerEvent::kSent : MessengerEvent::kReceived;
      event.token = transfer.sender == side ? transfer.token : transfer.receiveToken;
      if (transfer.sender == side || transfer.to)
        push(node, connection, side, event);
    }
    MessengerEvent event;
    event.kind = MessengerEvent::kLost;
    event.reason = failed("the connection is lost: " + why);
    push(node, connection, side, event);
  }

  /// Ends a connection by one side.
  static void end(const Shared &connection, int side, const std::string &why, bool dropFrames = false) {
    forget(connection, side);
    lose(connection, 1 - side, why, dropFrames);
    connection->transfers.clear();
  }

  static void endAll(Node &node, const std::string &why, bool dropFrames) {
    for (const auto &[connection, side] : node.connections())
      if (connection->ends[side])
        end(connection, side, why, dropFrames);
  }

  template <class Change> void change(const std::string &address, const Change &change) {
    const std::lock_guard lock(mutex);
    if (const auto node = nodes.find(address); node != nodes.end())
      change(*node->second);
  }
};

namespace {

using State = LocalNetwork::State;

class LocalMessenger : public Messenger {
public:
  LocalMessenger(std::shared_ptr<State> state, const std::string &host) : state_(std::move(state)) {
    const std::lock_guard lock(state_->mutex);
    node_.address = kScheme + std::to_string(state_->nextAddress++);
    node_.host = host;
    state_->nodes[node_.address] = &node_;
  }
  LocalMessenger(const LocalMessenger &) = delete;
  LocalMessenger &operator=(const LocalMessenger &) = delete;
  ~LocalMessenger() override {
    const std::lock_guard lock(state_->mutex);
    State::endAll(node_, "the peer has closed", false);
    state_->nodes.erase(node_.address);
  }

  const std::string &address() const override { return node_.address; }

  Result<uint32_t> connect(std::string_view address) override {
    const std::lock_guard lock(state_->mutex);
    if (address.substr(0, sizeof kScheme - 1) != kScheme)
      return invalid("the address of a messenger begins with '" + std::string(kScheme) + "'");
    if (node_.dead)
      return failed("this messenger is killed");
    const auto connection = std::make_shared<Connection>();
    connection->ends[0] = &node_;
    const uint32_t number = numberOf(connection, 0);
    const auto peer = state_->nodes.find(std::string(address));
    if (peer == state_->nodes.end() || peer->second->dead || peer->second->cut || node_.cut)
      State::lose(connection, 0, "the peer does not answer", true);
    else
      (connection->ends[1] = peer->second)->unmet.push_back(connection);
    return number;
  }

  void disconnect(uint32_t peer) override {
    const std::lock_guard lock(state_->mutex);
    if (peer < node_.links.size() && node_.links[peer].first)
      State::end(Shared(node_.links[peer].first), node_.links[peer].second, "the peer has disconnected");
  }

  Status send(uint32_t peer, const Frame &frame, std::string_view text) override {
    return post(peer, frame, text, nullptr);
  }
  Status sendData(uint32_t peer, const Frame &frame, const std::byte *data, uint64_t bytes, uint64_t token) override {
    const Transfer transfer{0, data, bytes, token};
    if (bytes == 0)
      return invalid("no data");
    return post(peer, frame, {}, &transfer);
  }

  Status receive(uint32_t peer, uint64_t data, std::byte *to, uint64_t token) override {
    const std::lock_guard lock(state_->mutex);
    Connection *connection = find(peer);
    if (!connection)
      return failed("the connection is lost");
    const int side = node_.links[peer].second;
    const auto transfer = connection->transfers.find(data);
    if (transfer == connection->transfers.end() || transfer->second.sender == side || transfer->second.to)
      return invalid("no data have this number");
    transfer->second.to = to;
    transfer->second.receiveToken = token;
    MessengerEvent event;
    event.kind = MessengerEvent::kReceived;
    event.token = token;
    State::push(node_, node_.links[peer].first, side, event, data);
    return {};
  }

  std::optional<MessengerEvent> poll() override {
    const std::lock_guard lock(state_->mutex);
    const auto now = Clock::now();
    if (node_.dead || node_.frozen)
      return {};
    for (auto each = node_.inbox.begin(); each != node_.inbox.end() && each->due <= now;) {
      const Node *sender = each->connection->ends[1 - each->side];
      if (sender && sender->frozen) {
        ++each;
        continue;
      }
      Delivery delivery = std::move(*each);
      each = node_.inbox.erase(each);
      if (deliver(delivery))
        return std::move(delivery.event);
    }
    return {};
  }

  bool readsMemory(uint32_t peer) const override {
    const std::lock_guard lock(state_->mutex);
    const Node *other = otherEnd(peer);
    return other && other->host == node_.host;
  }
  bool readMemory(uint32_t peer, std::byte *to, uint64_t from, uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    Node *other = otherEnd(peer);
    if (!other || other->host != node_.host || node_.dead)
      return false;
    other->served += bytes;
    copyAsAnotherProcess(to, from, bytes);
    return true;
  }

private:
  uint32_t numberOf(const Shared &connection, int side) {
    uint32_t number = 0;
    while (number < node_.links.size() && node_.links[number].first)
      ++number;
    node_.links.resize(std::max<size_t>(node_.links.size(), number + 1));
    node_.links[number] = {connection, side};
    std::erase(node_.unmet, connection);
    connection->numbers[side] = number;
    return number;
  }

  Node *otherEnd(uint32_t peer) const {
    if (peer >= node_.links.size() || !node_.links[peer].first)
      return nullptr;
    return node_.links[peer].first->ends[1 - node_.links[peer].second];
  }
  /// Null if the peer is unknown or lost.
  Connection *find(uint32_t peer) {
    if (!otherEnd(peer) || node_.dead || node_.links[peer].first->lost[node_.links[peer].second])
      return nullptr;
    return node_.links[peer].first.get();
  }

  Status post(uint32_t peer, const Frame &frame, std::string_view text, const Transfer *transfer) {
    const std::lock_guard lock(state_->mutex);
    Connection *connection = find(peer);
    if (text.size() > kMaxFrameText)
      return invalid("a text of " + std::to_string(text.size()) + " bytes, expected at most " +
                     std::to_string(kMaxFrameText));
    if (!connection)
      return failed("the connection is lost");
    const int side = node_.links[peer].second;
    if (connection->unread[1 - side] >= kMaxFrames)
      return failed("the peer has not received " + std::to_string(kMaxFrames) + " frames");
    MessengerEvent event;
    event.frame = frame;
    event.text = text;
    if (transfer) {
      node_.served += transfer->bytes;
      event.dataBytes = transfer->bytes;
      event.data = connection->nextTransfer++;
      connection->transfers[event.data] = *transfer;
      connection->transfers[event.data].sender = side;
    }
    ++connection->unread[1 - side];
    State::push(*connection->ends[1 - side], node_.links[peer].first, 1 - side, std::move(event));
    return {};
  }

  /// Completes an event; false if the caller does not get it.
  bool deliver(Delivery &delivery) {
    const Shared &connection = delivery.connection;
    const int side = delivery.side;
    MessengerEvent &event = delivery.event;
    if (event.kind == MessengerEvent::kLost) {
      const std::optional<uint32_t> number = connection->numbers[side];
      State::forget(connection, side);
      event.peer = number.value_or(0);
      return number.has_value();
    }
    event.peer = connection->numbers[side] ? *connection->numbers[side] : numberOf(connection, side);
    if (event.kind == MessengerEvent::kArrived)
      --connection->unread[side];
    if (event.kind == MessengerEvent::kReceived && delivery.transfer) {
      const Transfer transfer = connection->transfers.at(delivery.transfer);
      connection->transfers.erase(delivery.transfer);
      std::memcpy(transfer.to, transfer.data, transfer.bytes);
      MessengerEvent sent;
      sent.kind = MessengerEvent::kSent;
      sent.token = transfer.token;
      State::push(*connection->ends[1 - side], connection, 1 - side, sent);
    }
    return true;
  }

  const std::shared_ptr<State> state_;
  Node node_;
};

} // namespace

LocalNetwork::LocalNetwork() : state_(std::make_shared<State>()) {}

std::unique_ptr<Messenger> LocalNetwork::open(const std::string &host) {
  return std::make_unique<LocalMessenger>(state_, host);
}

void LocalNetwork::kill(const std::string &address) {
  state_->change(address, [](Node &node) {
    State::endAll(node, "the peer was killed", true);
    node.dead = true;
  });
}

void LocalNetwork::freeze(const std::string &address, bool frozen) {
  state_->change(address, [&](Node &node) { node.frozen = frozen; });
}

void LocalNetwork::cut(const std::string &address, bool isCut) {
  state_->change(address, [&](Node &node) {
    node.cut = isCut;
    for (const auto &[connection, side] : node.connections())
      if (isCut && connection->ends[1 - side]) {
        State::lose(connection, side, "the network is cut", true);
        State::lose(connection, 1 - side, "the network is cut", true);
        connection->transfers.clear();
      }
  });
}

uint64_t LocalNetwork::served(const std::string &address) {
  uint64_t bytes = 0;
  state_->change(address, [&](Node &node) { bytes = node.served; });
  return bytes;
}

void LocalNetwork::delay(const std::string &address, double seconds) {
  state_->change(address, [&](Node &node) { node.delay = std::chrono::duration<double>(seconds); });
}

} // namespace reshard::tests
