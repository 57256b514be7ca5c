// One tier of rounds.cpp: all messages inside nodes, or all between them. Senders and receivers are ports, who has
// something for whom is a pair, and what a pair sends is a queue of hops of streams.
#pragma once

#include "compiler/rounds.h"

#include <algorithm>
#include <unordered_map>

namespace reshard {

inline constexpr uint32_t kNone = UINT32_MAX;

/// One hop of one stream in the queue of its pair.
struct Item {
  uint32_t stream, hop;
  bool goesOn;                                                // from where it comes to
  int64_t bytes = 0;                                          // of the stream
  int64_t sent = 0, ready = 0;                                // of these, from the start
  llvm::SmallVector<std::pair<int64_t, uint32_t>, 1> brought; // up to where, by messages that began in which round

  /// What a message that began in `round` may take: what earlier ones bring, so that steps can wait for steps.
  int64_t readyFor(uint32_t round) const {
    if (brought.empty() || brought.back().second < round)
      return ready;
    const auto end =
        std::partition_point(brought.begin(), brought.end(), [&](const auto &each) { return each.second < round; });
    return end == brought.begin() ? 0 : std::prev(end)->first;
  }
};

struct Pair {
  int32_t from, to; // ranks
  uint32_t out, in; // ports of the tier
  std::vector<Item> items;
  size_t first = 0;         // items before it are done
  size_t current = 0;       // the one that sent last
  int64_t ready = 0;        // bytes that could go now
  int64_t left = 0;         // bytes to go
  int64_t given = 0;        // bytes of its last chunk
  uint32_t message = kNone; // that it is sending
  uint32_t slot = kNone;    // in Tier::active_
  int64_t planned = 0;      // chunks that go on without a look at it; see Tier::begin
};

/// One end of a rank's link, or of its share of a NIC.
struct Port {
  int32_t rank = 0;
  bool sends = true;
  size_t idle = 0;             // its place in Tier::idle_, where nobody has it
  uint64_t search = 0;         // the last one that came by
  std::vector<uint32_t> pairs; // open ones, and some that are done
  size_t next = 0;             // where it looks first, if it has many
  int64_t most = INT64_MAX;    // chunks to go of the best partner when it last looked at all of very many
};

/// A pair that has its ports.
struct Active {
  uint32_t pair, out, in;
  uint32_t turn = kNone; // the round in which it may have to make room
  int64_t coming = 0;    // of the chunks that it planned, those to come
};

/// Bytes up to `end` of a grant that go on from `round` on.
struct Arrival {
  uint32_t round, message;
  size_t grant;
  int64_t end;
};

/// All pairs inside nodes, or all between them.
class Tier {
public:
  /// `relays`: whether anything goes on from rank to rank.
  Tier(int64_t bytes, uint32_t rounds, bool relays, std::vector<Message> &messages, const Cuts &cuts)
      : bytes_(bytes), rounds_(rounds), relays_(relays), messages_(messages), cuts_(cuts) {}

  uint32_t pair(int32_t from, int32_t to);

  /// Queues a hop; returns its place in the queue.
  size_t add(uint32_t pair, uint32_t stream, uint32_t hop, bool goesOn, int64_t bytes);

  /// Lets an item go up to `upTo`, in parts of `least` bytes or more, cut where that is best. What is passed on came
  /// with a message that began in round `brought`.
  void makeReady(uint32_t pair, size_t item, int64_t upTo, int64_t least, uint32_t brought = kNone);

  bool done() const { return left_ == 0; }

  /// The chunks that begin in a round; what they bring is added to `arrivals`. Most are one more of what goes on
  /// anyway: such a pair says how many there will be, and until then nothing but the counters of its ports is touched,
  /// which with millions of chunks is most of the compiler's time. sync() makes up for it.
  void begin(uint32_t round, std::vector<Arrival> &arrivals);

private:
  uint32_t port(int32_t rank, bool sends);
  int64_t chunks(int64_t bytes) const { return (bytes + bytes_ - 1) / bytes_; }

  /// Enters a port among those that nobody has, or takes it out.
  void setIdle(uint32_t port, bool idle);

  /// More or fewer bytes to go.
  void change(Pair &pair, int64_t by);
  /// More or fewer chunks to go.
  void count(uint32_t port, int64_t by);
  /// The same by one less, of a port that sends or receives.
  void countDown(uint32_t port) {
    const int64_t now = --chunks_[port];
    --withChunks_[now + 1];
    ++withChunks_[now];
  }

  uint32_t other(const Port &port, const Pair &pair) const { return port.sends ? pair.in : pair.out; }

  /// Ports that came free choose, those with most left first; then a port with as much left as any that has nobody
  /// takes a partner from one with less.
  void match();

  /// Rounds of a turn of the message that a pair sends.
  uint32_t turn(const Pair &pair) const;

  /// Whether a pair makes room for another one that has waited for more, so that what goes on from rank to rank is soon
  /// everywhere: the longer all goes on, the longer each turn.
  bool yields(Active &active);

  void fill();

  /// The best pair with a free partner.
  uint32_t choose(uint32_t port);

  /// Looks, breadth first, for a way on which partners change hands: from `start` to a free partner, or to a port that
  /// may go empty instead since it has less left, the least of those as near (Berge; the ports with most can all be
  /// served, by König's theorem, where everything is ready).
  void augment(uint32_t start);

  void take(uint32_t pair);

  /// Plans the chunks that can follow without another look: of the item under way, that does not go on from where it
  /// comes to, since what waits for it must hear of every chunk.
  void plan(Active &active);

  /// Enters the planned chunks that have gone since.
  void sync(uint32_t number);

  /// Ends a pair's message. Where more of its last item could have gone, the end is moved to a good place.
  void release(uint32_t number);

  void send(Active &active, uint32_t round, std::vector<Arrival> &arrivals);

  /// Adds a chunk to the pair's message; false: there is nothing that it may take.
  bool add(Pair &pair, uint32_t round, std::vector<Arrival> &arrivals);

  const int64_t bytes_;
  const uint32_t rounds_; // that a chunk takes
  const bool relays_;
  std::vector<Message> &messages_;
  const Cuts &cuts_;
  std::vector<Pair> pairs_;
  std::vector<Port> ports_;
  std::vector<int64_t> chunks_; // of each port still to go, where every pair's bytes are cut into as few as may be
  std::vector<uint32_t> mates_; // the pair that has the port
  std::vector<uint32_t> withChunks_, idleWithChunks_; // how many ports, and of those that nobody has, by chunks to go
  int64_t top_ = 0;                                   // none has more chunks to go
  std::unordered_map<uint64_t, uint32_t> pairOf_, portOf_;
  std::vector<uint32_t> idle_[2]; // ports that nobody has: receiving, sending
  std::vector<Active> active_;    // pairs that send, and some that were released
  std::vector<uint32_t> free_;    // ports that may find a partner
  uint64_t search_ = 0;           // searches for another partner so far
  int64_t left_ = 0;
  int64_t most_ = 0; // chunks to go of the port with most, in the last round that looked for partners
};

} // namespace reshard
