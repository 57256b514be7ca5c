// SPDX-License-Identifier: Apache-2.0
// libFuzzer: frames that a process sends to a server of pull mode. A stranger, which does not have the server's token,
// gets no answer, and neither does a process with another rank than those of the plan, or of another version of
// reshard. Frames of a stranger or of a bad member change neither the memory, nor the lease of another client, nor what
// that client reads.

#include "executor/pull/server.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ranks.h"
#include "tests/lib/folder.h"

#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>

using namespace reshard;
using namespace reshard::pull;

namespace {

constexpr uint64_t kToken = 0x1c1c0ffee0ddba11, kVersion = 5;
constexpr uint64_t kBirth = uint64_t{1} << 63; // later than that of the process: a source refuses older ones
constexpr uint32_t kGoodRank = 4;              // rank 0 of replica 1
constexpr uint64_t kWrappedRank = (uint64_t{1} << 32) + kGoodRank;
constexpr uint64_t kWorld = 2 + 2 * uint64_t{kMaxReplicas}; // ranks of the source, and of all replicas that may join
/// Servers under test: the coordinator, and rank 0 of replica 0.
constexpr uint32_t kServers[] = {0, 2};

void require(bool condition) {
  if (!condition)
    std::abort();
}

/// A rank that serves a version.
struct Member {
  Member(const Plan &plan, const Fleet &fleet, uint32_t rank) : memory(plan, fleet.planRank(rank)) {
    require(table.build(plan, fleet, memory.local, rank).ok());
    memory.fill(kVersion);
    for (message = 0; table.find(message, kGoodRank, served) != MessageTable::Serves::yes; ++message)
      require(message < 1000);
    expected.resize(served.packing->bytes());
    served.packing->pack(0, expected.size(), expected.data());
    bytes = memory.bytes();
  }
  tests::RankMemory memory;
  MessageTable table;
  uint32_t message = 0; // that the good client reads
  ServedMessage served;
  std::vector<std::byte> expected;                           // its bytes
  decltype(std::declval<tests::RankMemory>().bytes()) bytes; // of all memory
};

struct Job {
  Job() {
    const tests::TemporaryFolder folder;
    tests::compile("version: 1\n"
                   "model: {dtype: bf16, tensors: {r: {shape: [96, 48], shard: {0: tp}}, c: {shape: [64, 48], shard: "
                   "{1: tp}}}}\n"
                   "source: {mesh: {tp: 2}}\n"
                   "target: {mesh: {tp: 2}, ranks: 2..3, replicas: 4}\n",
                   folder / "plan");
    require(Plan::open(folder / "plan", plan).ok());
    fleet = *Fleet::of(*plan);
    for (const uint32_t rank : kServers)
      members.push_back(std::make_unique<Member>(*plan, fleet, rank));
  }
  std::unique_ptr<Plan> plan;
  Fleet fleet;
  std::vector<std::unique_ptr<Member>> members;
};

/// Bytes of the input, then random ones that follow from them: there are few runs in a second, and libFuzzer makes
/// inputs longer only after thousands of them.
class Input {
public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size), random_(hash(data, size)) {}
  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0)
      return static_cast<uint8_t>(random_());
    --size_;
    return *data_++;
  }
  /// A number that a frame may have, or any.
  uint64_t word(uint32_t message) {
    const uint64_t values[] = {
        0,         1,      2,         3,         message,      96,          1 << 10,    kVersion,     kVersion + 1,
        kBirth,    kToken, kProtocol, kGoodRank, kWrappedRank, kRangeBytes, UINT32_MAX, kMaxReplicas, UINT64_MAX - 95,
        UINT64_MAX};
    const uint8_t choice = byte();
    if (choice < std::size(values))
      return values[choice];
    uint64_t any = choice;
    for (int i = 0; choice >= 128 && i < 7; ++i)
      any = any << 8 | byte();
    return any;
  }
  /// A frame as a client sends it, of which the input replaces some words: so also a short input has frames that the
  /// server does not drop at its first check.
  Frame frame(uint32_t message) {
    const uint8_t kind = byte() % 32, replaced = byte();
    Frame frame = usual(static_cast<FrameKind>(kind), message);
    for (uint8_t i = 0; i < 8; ++i)
      if (replaced >> i & 1)
        frame.words[i] = word(message);
    return frame;
  }
  std::string text() {
    std::string text(byte() % 64, '\0');
    for (char &each : text)
      each = static_cast<char>(byte());
    return text;
  }

private:
  static uint32_t hash(const uint8_t *data, size_t size) {
    return std::accumulate(data, data + size, 2166136261U,
                           [](uint32_t h, uint8_t byte) { return (h ^ byte) * 16777619; });
  }
  static Frame usual(FrameKind kind, uint64_t message) {
    switch (kind) {
    case FrameKind::hello:
      return makeFrame(kind, {kToken, kGoodRank, kProtocol});
    case FrameKind::fetch:
      return makeFrame(kind, {kVersion, message, 0, 96, 0, 0, kBirth});
    case FrameKind::confirm:
      return makeFrame(kind, {kVersion, 1});
    case FrameKind::leave:
      return makeFrame(kind, {kVersion});
    case FrameKind::askDigests:
      return makeFrame(kind, {kVersion, kBirth, 0});
    case FrameKind::coordinator:
      return makeFrame(kind, {kToken});
    case FrameKind::published:
      return makeFrame(kind, {kVersion, kToken, kBirth});
    case FrameKind::begin:
      return makeFrame(kind, {kVersion, 1, 0, 1000});
    case FrameKind::complete:
    case FrameKind::resume:
      return makeFrame(kind, {1});
    default:
      return makeFrame(kind);
    }
  }

  const uint8_t *data_;
  size_t size_;
  std::mt19937 random_;
};

/// A client that follows the protocol.
class GoodClient {
public:
  GoodClient(std::unique_ptr<Messenger> messenger, const std::string &server, const Member &member)
      : messenger_(std::move(messenger)), member_(member), peer_(*messenger_->connect(server)) {
    send(FrameKind::hello, {kToken, kGoodRank, kProtocol});
    require(answer(FrameKind::welcome).frame.words[1] == kToken);
  }
  /// Waits until the server has handled all frames that were sent to it before.
  void synchronize() {
    send(FrameKind::ping, {});
    answer(FrameKind::pong);
  }
  /// Reads the message, which is right and confirmed, by the lease of the first read.
  void read() {
    const uint64_t bytes = member_.expected.size();
    send(FrameKind::fetch, {kVersion, member_.message, 0, bytes, 0, 0, kBirth});
    const MessengerEvent data = answer(FrameKind::data);
    std::vector<std::byte> found(bytes);
    require(data.dataBytes == bytes && messenger_->receive(peer_, data.data, found.data(), 0).ok());
    require(next(MessengerEvent::kReceived).ok && found == member_.expected);
    lease_ = lease_ ? lease_ : data.frame.words[7];
    confirm();
  }
  /// The lease has not ended. A read would begin another one, which may have the same number.
  void confirm() {
    send(FrameKind::confirm, {kVersion, lease_});
    require(lease_ != 0 && answer(FrameKind::confirmed).frame.words[2] == 1);
  }
  /// The number of replicas that the coordinator knows.
  uint64_t replicas() {
    send(FrameKind::list, {});
    return answer(FrameKind::listed).frame.words[1];
  }

private:
  void send(FrameKind kind, std::initializer_list<uint64_t> words) {
    require(messenger_->send(peer_, makeFrame(kind, words)).ok());
  }
  MessengerEvent answer(FrameKind kind) {
    MessengerEvent event = next(MessengerEvent::kArrived);
    require(kindOf(event.frame) == kind);
    return event;
  }
  MessengerEvent next(MessengerEvent::Kind kind) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (true) {
      if (std::optional<MessengerEvent> event = messenger_->poll()) {
        require(event->kind == kind);
        return std::move(*event);
      }
      require(std::chrono::steady_clock::now() < end);
      std::this_thread::yield();
    }
  }

  const std::unique_ptr<Messenger> messenger_;
  const Member &member_;
  const uint32_t peer_;
  uint64_t lease_ = 0;
};

/// A process that sends the frames of the input.
class BadPeer {
public:
  BadPeer(std::unique_ptr<Messenger> messenger, std::string server, bool stranger)
      : messenger_(std::move(messenger)), server_(std::move(server)), stranger_(stranger) {}

  /// As a client, unless it is a stranger. `known`: whether the server may answer a client.
  void connect(uint64_t rank, uint64_t protocol, bool known) {
    if (peer_)
      messenger_->disconnect(*peer_);
    peer_ = *messenger_->connect(server_);
    known_ = known && !stranger_;
    if (!stranger_)
      send(makeFrame(FrameKind::hello, {kToken, rank, protocol}), {});
  }
  void send(const Frame &frame, const std::string &text) {
    if (peer_ && !(stranger_ && frame.words[1] == kToken)) [[maybe_unused]]
      const Status ignored = messenger_->send(*peer_, frame, text);
  }
  /// Handles the frames of the server.
  void take(bool receives) {
    while (const std::optional<MessengerEvent> event = messenger_->poll()) {
      if (event->peer != peer_) // an earlier connection
        continue;
      if (event->kind == MessengerEvent::kLost)
        peer_.reset();
      if (event->kind != MessengerEvent::kArrived)
        continue;
      require(known_ && event->dataBytes <= sizeof memory_);
      if (event->dataBytes > 0 && receives) [[maybe_unused]]
        const Status ignored = messenger_->receive(event->peer, event->data, memory_, 0);
    }
  }

private:
  const std::unique_ptr<Messenger> messenger_;
  const std::string server_;
  const bool stranger_;
  bool known_ = false; // to the server of this connection
  std::optional<uint32_t> peer_;
  std::byte memory_[1 << 16];
};

void fuzz(const Job &job, Input &input) {
  const uint8_t first = input.byte();
  const uint32_t rank = kServers[first & 1];
  Member &member = *job.members[first & 1];
  const bool stranger = first & 2;
  tests::LocalNetwork network;
  PullProgress progress(member.table.received().size());
  Server server(network.open(), member.table, progress, {job.fleet, rank, kToken, {}});
  const std::string address = server.address();
  server.start();
  if (job.fleet.isTarget(rank)) {
    server.serve({kBirth, kVersion});
    for (size_t m = 0; m < member.table.received().size(); ++m)
      progress.confirm(m, member.table.received()[m].packing.bytes());
    progress.setLocals(static_cast<uint32_t>(member.table.locals().size()));
  } else {
    require(server.publish(kVersion, std::vector<CountedDigest>(3)).ok());
  }
  GoodClient good(network.open(), address, member);
  good.read();
  {
    BadPeer bad(network.open(), address, stranger);
    constexpr int kMinFrames = 32;
    for (int frames = 0; frames < kMinFrames || !input.empty(); ++frames) {
      const uint8_t step = frames == 0 ? 0 : input.byte();
      if (step % 16 == 0) {
        const uint8_t choice = input.byte();
        const uint64_t rank = choice % 16 < 10 ? choice % 16 : input.word(member.message),
                       protocol = choice < 128 ? kProtocol : input.word(member.message);
        bad.connect(rank, protocol, rank < kWorld && protocol == kProtocol);
      }
      const Frame frame = input.frame(member.message);
      bad.send(frame, step & 0x40 ? input.text() : std::string());
      good.synchronize();
      bad.take(step & 0x80); // the answer, if there is one
    }
    good.confirm();
    good.read();
    require(server.leases() >= 1 && (!stranger || server.leases() == 1));
    require(rank != 0 || !stranger || good.replicas() == 0);
  }
  good.read();
  server.stop();
  require(member.memory.bytes() == member.bytes);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const Job job;
  Input input(data, size);
  fuzz(job, input);
  return 0;
}
