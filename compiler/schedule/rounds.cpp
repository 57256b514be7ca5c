// SPDX-License-Identifier: Apache-2.0
// Keeps a matching of senders and receivers for each link tier and changes it from round to round: a port that becomes
// free takes the free partner with nearly the most chunks left, or an augmenting path exchanges partners to free one. A
// matched pair sends chunk after chunk of its flows until its turn ends.
#include "compiler/schedule/rounds.h"

#include "compiler/schedule/dense_pairs.h"
#include "compiler/transfer/lists.h"
#include "compiler/transfer/staging.h"

#include "llvm/ADT/DenseMap.h"

#include <algorithm>
#include <tuple>

namespace reshard {

namespace {

inline constexpr uint32_t kNone = UINT32_MAX;

/// The turn of a message that began in round r lasts r / kTurns rounds if another pair waits.
constexpr uint32_t kTurns = 2;
/// A port with more pairs than this chooses the first one that has nearly the most chunks left, without a scan of the
/// others: if all are equal, as between shards and shards, full scans would be most of the running time.
constexpr size_t kFullScanPairs = 64;
/// Among dense pairs, where a look at a pair costs little, it looks at no fewer than this before it chooses: the plan
/// then has no more rounds and messages than with lists, whose order differs.
constexpr size_t kMinVisited = 4;
/// A port with more pairs than this chooses the first one that has as many chunks left as the best one had in the
/// port's last full scan: a rank that sends to very many ranks would otherwise scan all of them for each.
constexpr size_t kCachedScanPairs = 1 << 12;
/// A lookup of a pair costs as much as a scan of so many pairs of a list.
constexpr size_t kLookupCost = 8;
/// The number of pairs that one search for an augmenting path visits.
constexpr size_t kMaxSearchPairs = 1 << 14;
/// Bytes that a node's entry rank sends to several other ranks of its node, where they end, wait for more bytes of
/// their flow: for 1 / kParts of the flow and for 1 / kParts of what the entry has still to receive from other
/// nodes. Otherwise the entry would alternate between these ranks with every chunk, and each chunk would be a message.
/// The wait costs the time of the last part alone. Flows that arrive early, most of them, are forwarded as a whole.
constexpr int64_t kParts = 8;

uint64_t key(int64_t a, int64_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint64_t>(b); }

/// One hop of one flow in the queue of its pair.
struct QueuedHop {
  uint32_t flow, hop;
  bool forwarded;                                             // other hops follow this one
  int64_t bytes = 0;                                          // the length of the flow
  int64_t sent = 0, ready = 0;                                // the first bytes that were sent, and that may be sent
  llvm::SmallVector<std::pair<int64_t, uint32_t>, 1> arrived; // (end of the bytes, first round of their message)

  /// The end of the bytes that a message that began in `round` may send: what messages that began earlier have brought.
  /// A step can then wait for whole steps.
  int64_t readyFor(uint32_t round) const {
    if (arrived.empty() || arrived.back().second < round)
      return ready;
    const auto end =
        std::partition_point(arrived.begin(), arrived.end(), [&](const auto &each) { return each.second < round; });
    return end == arrived.begin() ? 0 : std::prev(end)->first;
  }
};

/// A sender and a receiver of a tier, and all bytes between them.
struct Pair {
  int32_t from, to; // world ranks
  uint32_t out, in; // ports of the tier
  llvm::SmallVector<QueuedHop, 1> queue;
  size_t first = 0;         // hops of the queue before this one are done
  size_t current = 0;       // the hop that sent last
  int64_t lastChunk = 0;    // bytes of its last chunk
  uint32_t message = kNone; // the message that it is sending
  uint32_t slot = kNone;    // index in Tier::active_
  int64_t planned = 0;      // chunks that are sent before the pair is examined again; see Tier::begin
};

/// One direction of a rank's link, or of its share of a NIC.
struct Port {
  int32_t rank = 0;
  bool sends = true;
  size_t idle = 0;                   // index in Tier::idle_ while the port is unmatched
  uint64_t search = 0;               // the last search that visited the port
  std::vector<uint32_t> pairs;       // pairs with bytes left, and some without
  std::vector<uint32_t> partners;    // for each of them, the port on the other side
  size_t next = 0;                   // where a scan begins if there are more than kFullScanPairs pairs: index of the
                                     // pair, or number of the partner in DensePairs
  int64_t maxChunksLeft = INT64_MAX; // the most that a partner had in the last full scan (kCachedScanPairs)
};

/// A matched pair.
struct Active {
  uint32_t pair, out, in;
  uint32_t turn = kNone; // the round in which its turn ends
  int64_t pending = 0;   // planned chunks that are still to be sent
};

/// Bytes up to `end` of a grant, which may be forwarded from `round` on.
struct RelayArrival {
  uint32_t round, message;
  size_t grant;
  int64_t end;
};

/// All pairs of one link tier. The functions change the matching from round to round and append messages.
class Tier {
public:
  /// `bytes`: the length of a chunk, which takes `rounds` rounds. `relays`: whether any flow has more than one hop.
  Tier(int64_t bytes, uint32_t rounds, bool relays, std::vector<Message> &messages, const Cuts &cuts)
      : bytes_(bytes), rounds_(rounds), relays_(relays), messages_(messages), cuts_(cuts) {}

  /// The number of a pair of world ranks, which is added if it is new.
  uint32_t pair(int32_t from, int32_t to);

  /// Appends a hop to the queue of a pair; returns its index in the queue.
  size_t enqueue(uint32_t pair, uint32_t flow, uint32_t hop, bool forwarded, int64_t bytes);

  /// Allows bytes up to `upTo` of a queued hop to be sent, rounded down to a good cut; does nothing if these are fewer
  /// than `least` more bytes and not the last. `arrived`: the first round of the message that brought them; kNone if
  /// they were there from the start.
  void makeReady(uint32_t pair, size_t queued, int64_t upTo, int64_t least, uint32_t arrived = kNone);

  /// Called when all hops are in queues.
  void finishQueues();

  bool done() const { return left_ == 0; }
  size_t pairs() const { return pairs_.size(); }

  /// The bytes that a rank has still to receive, in whole chunks.
  int64_t bytesToReceive(int32_t rank) const {
    const auto port = portOf_.find(key(rank, false));
    return port == portOf_.end() ? 0 : chunks_[port->second] * bytes_;
  }

  /// Sends the chunks that begin in a round; appends the forwarded ones to `arrivals`. Most chunks only continue
  /// a message. A pair therefore plans how many chunks follow, and until then only the counters of its ports are
  /// updated: with millions of chunks this loop takes most of the compiler's time. sync() updates the rest.
  void begin(uint32_t round, std::vector<RelayArrival> &arrivals);

private:
  uint32_t port(int32_t rank, bool sends);
  int64_t chunks(int64_t bytes) const { return (bytes + bytes_ - 1) / bytes_; }

  /// Adds a port to the unmatched ones, or removes it.
  void setIdle(uint32_t port, bool idle);

  /// Adds `by` (which can be negative) to the bytes left of a pair, and the change of its chunks to the chunks of its
  /// ports.
  void change(Pair &pair, int64_t by);
  size_t numberOf(const Pair &pair) const { return static_cast<size_t>(&pair - pairs_.data()); }
  int64_t left(const Pair &pair) const { return leftOf_[numberOf(pair)]; }
  /// Sets the bytes left of a pair, without its ports.
  void setLeft(Pair &pair, int64_t bytes) {
    int64_t &before = leftOf_[numberOf(pair)];
    left_ += bytes - before;
    if ((bytes == 0) != (before == 0) && !dense_.empty())
      dense_.setLeft(pair.out, pair.in, bytes > 0);
    before = bytes;
  }
  /// Removes the pairs without bytes left from the list of a port.
  void removeDone(Port &port);
  /// Adds `by` (which can be negative) to the chunks left of a port.
  void count(uint32_t port, int64_t by);
  /// count(port, -1) for a matched port, without the branches.
  void countDown(uint32_t port) {
    const int64_t now = --chunks_[port];
    --withChunks_[now + 1];
    ++withChunks_[now];
  }

  /// The port of `pair` on the other side of `port`.
  uint32_t other(const Port &port, const Pair &pair) const { return port.sends ? pair.in : pair.out; }

  /// Completes the matching: free ports choose partners; then each unmatched port with the most chunks left takes over
  /// the partner of a port with fewer, along an augmenting path.
  void match();

  /// The rounds of a turn of the message that a pair sends.
  uint32_t turn(const Pair &pair) const;

  /// At the end of a turn: whether the pair releases its ports because its sender has another pair whose receiver is
  /// unmatched and has more chunks left. Flows then reach all ranks early. Also sets the end of the next turn.
  bool yields(Active &active);

  /// Matches the ports of free_, beginning with the ports that have the most chunks left.
  void fill();

  /// The best pair of a port with an unmatched partner; kNone if there is none.
  uint32_t choose(uint32_t port);

  /// Searches, breadth first, for an alternating path from the unmatched port `start` to an unmatched partner, or to a
  /// port with fewer chunks left, which becomes unmatched instead (of several at one distance, the one with the
  /// fewest). Swaps the pairs along the path (Berge). If all bytes are ready, all ports with the most chunks can be
  /// matched (König).
  void augment(uint32_t start);

  /// Matches a pair; releases the pairs that had its ports.
  void take(uint32_t pair);

  /// Sets the number of chunks that can follow before the pair is examined again: those of the current hop, if it is
  /// not forwarded (forwarding needs each arrival).
  void plan(Active &active);

  /// Enters the planned chunks that were sent since plan().
  void sync(uint32_t number);

  /// Ends a pair's message and its match. If the last hop has more bytes ready, moves the end back to a good cut.
  void release(uint32_t number);

  /// Sends a chunk of a matched pair, in its message or in a new one.
  void send(Active &active, uint32_t round, std::vector<RelayArrival> &arrivals);

  /// Adds a chunk to the pair's message. Returns false if the message may not send any of the ready bytes.
  bool addChunk(Pair &pair, uint32_t round, std::vector<RelayArrival> &arrivals);

  const int64_t bytes_;   // the length of a chunk
  const uint32_t rounds_; // how many rounds a chunk takes
  const bool relays_;
  std::vector<Message> &messages_;
  const Cuts &cuts_;
  std::vector<Pair> pairs_;
  std::vector<Port> ports_;
  std::vector<int64_t> chunks_; // by port: chunks left, if the bytes of every pair are cut into as few as possible
  std::vector<uint32_t> mates_; // by port: its matched pair, or kNone
  std::vector<uint32_t> withChunks_, idleWithChunks_; // by chunks left: the number of ports, and of unmatched ports
  int64_t top_ = 0;                                   // no port has more chunks left
  llvm::DenseMap<uint64_t, uint32_t> pairOf_, portOf_;
  DensePairs dense_;
  // By pair, outside Pair because most looks at a pair need only these: bytes still to send, bytes that may be sent
  // now.
  std::vector<int64_t> leftOf_, readyOf_;
  std::vector<uint32_t> idle_[2];                   // unmatched ports: receiving, sending
  std::vector<Active> active_;                      // matched pairs, and some that were released
  std::vector<uint32_t> free_;                      // ports that may find a partner
  std::vector<std::pair<int64_t, uint32_t>> order_; // fill() sorts these: chunks left, negated, and port
  uint64_t search_ = 0;                             // the number of searches of augment() so far
  int64_t left_ = 0;                                // bytes left of all pairs
  int64_t most_ = 0; // the most chunks left of any port in the last round that changed the matching
};

uint32_t Tier::pair(int32_t from, int32_t to) {
  const auto [at, isNew] = pairOf_.try_emplace(key(from, to), static_cast<uint32_t>(pairs_.size()));
  if (isNew) {
    pairs_.push_back({from, to, port(from, true), port(to, false), {}});
    leftOf_.push_back(0);
    readyOf_.push_back(0);
    const Pair &added = pairs_.back();
    ports_[added.out].pairs.push_back(at->second);
    ports_[added.out].partners.push_back(added.in);
    ports_[added.in].pairs.push_back(at->second);
    ports_[added.in].partners.push_back(added.out);
  }
  return at->second;
}

size_t Tier::enqueue(uint32_t pair, uint32_t flow, uint32_t hop, bool forwarded, int64_t bytes) {
  Pair &p = pairs_[pair];
  p.queue.push_back({flow, hop, forwarded, bytes, 0, 0, {}});
  change(p, bytes);
  return p.queue.size() - 1;
}

void Tier::finishQueues() {
  std::vector<bool> sends;
  sends.reserve(ports_.size());
  for (const Port &port : ports_)
    sends.push_back(port.sends);
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  pairs.reserve(pairs_.size());
  for (const Pair &pair : pairs_)
    pairs.emplace_back(pair.out, pair.in);
  dense_.fill(sends, pairs);
}

void Tier::makeReady(uint32_t pair, size_t queued, int64_t upTo, int64_t least, uint32_t arrived) {
  Pair &p = pairs_[pair];
  QueuedHop &i = p.queue[queued];
  if (upTo - i.ready < std::min(least, i.bytes - i.ready))
    return;
  if (upTo < i.bytes && (least > 0 || !cuts_.possible(i.flow, upTo)))
    upTo = cuts_.best(i.flow, i.ready, upTo);
  if (upTo <= i.ready)
    return;
  if (readyOf_[pair] == 0) {
    free_.push_back(p.out);
    free_.push_back(p.in);
  }
  readyOf_[pair] += upTo - i.ready;
  i.ready = upTo;
  if (arrived == kNone)
    return;
  if (i.arrived.empty() || i.arrived.back().second != arrived)
    i.arrived.emplace_back(upTo, arrived);
  i.arrived.back().first = upTo;
}

void Tier::begin(uint32_t round, std::vector<RelayArrival> &arrivals) {
  if (round % rounds_ != 0 || left_ == 0)
    return;
  for (Active &each : active_) {
    if (mates_[each.out] != each.pair)
      continue;
    if (each.pending == 0)
      sync(each.pair);
    if ((each.pending == 0 && readyOf_[each.pair] == 0) || (round >= each.turn && yields(each)))
      release(each.pair);
  }
  uint32_t tail = 0;
  for (const Active &each : active_) {
    const bool sends = mates_[each.out] == each.pair;
    pairs_[each.pair].slot = sends ? tail : kNone;
    if (sends)
      active_[tail++] = each;
  }
  active_.resize(tail);
  match();
  for (Active &each : active_) {
    if (mates_[each.out] != each.pair)
      continue;
    if (each.pending == 0) {
      send(each, round, arrivals);
      continue;
    }
    --each.pending;
    countDown(each.out);
    countDown(each.in);
  }
}

uint32_t Tier::port(int32_t rank, bool sends) {
  const auto [at, added] = portOf_.try_emplace(key(rank, sends), static_cast<uint32_t>(ports_.size()));
  if (added) {
    ports_.emplace_back();
    ports_.back().rank = rank;
    ports_.back().sends = sends;
    chunks_.push_back(0);
    mates_.push_back(kNone);
    withChunks_.resize(std::max<size_t>(withChunks_.size(), 1));
    idleWithChunks_.resize(withChunks_.size());
    ++withChunks_[0];
    setIdle(at->second, true);
  }
  return at->second;
}

void Tier::setIdle(uint32_t port, bool idle) {
  std::vector<uint32_t> &all = idle_[ports_[port].sends];
  idleWithChunks_[chunks_[port]] += idle ? 1 : -1;
  if (!dense_.empty())
    dense_.setIdle(port, idle);
  if (idle) {
    ports_[port].idle = all.size();
    all.push_back(port);
    return;
  }
  ports_[all.back()].idle = ports_[port].idle;
  all[ports_[port].idle] = all.back();
  all.pop_back();
}

void Tier::change(Pair &pair, int64_t by) {
  if (by == -bytes_) { // the usual case, without a division
    setLeft(pair, left(pair) - bytes_);
    countDown(pair.out);
    countDown(pair.in);
    return;
  }
  const int64_t more = chunks(left(pair) + by) - chunks(left(pair));
  setLeft(pair, left(pair) + by);
  count(pair.out, more);
  count(pair.in, more);
}

void Tier::count(uint32_t port, int64_t by) {
  const int64_t before = chunks_[port], now = chunks_[port] += by;
  top_ = std::max(top_, now);
  if (static_cast<size_t>(top_) >= withChunks_.size()) {
    withChunks_.resize(static_cast<size_t>(top_) + 1);
    idleWithChunks_.resize(withChunks_.size());
  }
  for (auto *counts : {&withChunks_, &idleWithChunks_})
    if (counts == &withChunks_ || mates_[port] == kNone) {
      --(*counts)[before];
      ++(*counts)[now];
    }
}

void Tier::match() {
  fill();
  while (withChunks_[top_] == 0)
    --top_;
  most_ = top_;
  if (idleWithChunks_[most_] > 0)
    for (uint32_t p = 0; p < ports_.size(); ++p)
      if (chunks_[p] == most_ && mates_[p] == kNone)
        augment(p);
  fill();
}

uint32_t Tier::turn(const Pair &pair) const {
  return pair.message == kNone ? rounds_ : std::max(1u, messages_[pair.message].round / kTurns / rounds_) * rounds_;
}

bool Tier::yields(Active &active) {
  const Pair &pair = pairs_[active.pair];
  active.turn += turn(pair);
  if (pair.message == kNone)
    return false;
  const Port &mine = ports_[pair.out];
  return std::any_of(mine.pairs.begin(), mine.pairs.end(), [&](uint32_t n) {
    const Pair &rival = pairs_[n];
    return readyOf_[n] > 0 && mates_[rival.in] == kNone && chunks_[rival.in] > chunks_[pair.in];
  });
}

void Tier::fill() {
  order_.clear();
  for (uint32_t p : free_)
    if (mates_[p] == kNone)
      order_.emplace_back(-chunks_[p], p);
  free_.clear();
  std::sort(order_.begin(), order_.end());
  order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
  for (const auto &[chunks, p] : order_)
    if (mates_[p] == kNone)
      if (const uint32_t pair = choose(p); pair != kNone)
        take(pair);
}

uint32_t Tier::choose(uint32_t port) {
  Port &mine = ports_[port];
  uint32_t best = kNone;
  std::pair<int64_t, int64_t> most; // what `best` has: chunks left of the partner, bytes left of the pair
  auto consider = [&](uint32_t candidate, uint32_t partner) {
    if (mates_[partner] != kNone)
      return;
    const std::pair<int64_t, int64_t> left = {chunks_[partner], leftOf_[candidate]};
    if (left.second > 0 && (best == kNone || left > most) && readyOf_[candidate] > 0) {
      best = candidate;
      most = left;
    }
  };
  const bool cached = mine.pairs.size() > kCachedScanPairs;
  auto good = [&] {
    return best != kNone && (most.first >= most_ - most_ / 8 || (cached && most.first >= mine.maxChunksLeft));
  };
  // Scan the unmatched ports if they are few, else the pairs of this port.
  const std::vector<uint32_t> &idle = idle_[!mine.sends];
  if (idle.size() * kLookupCost < mine.pairs.size()) {
    for (size_t i = 0; i < idle.size() && !good(); ++i) {
      const uint32_t partner = idle[i];
      if (best != kNone && chunks_[partner] < most.first)
        continue;
      if (!dense_.empty()) {
        if (const uint32_t pair = dense_.find(port, partner); pair != DensePairs::kNone)
          consider(pair, partner);
        continue;
      }
      const int32_t rank = ports_[partner].rank;
      if (const auto pair = pairOf_.find(mine.sends ? key(mine.rank, rank) : key(rank, mine.rank));
          pair != pairOf_.end())
        consider(pair->second, partner);
    }
    return best;
  }
  const bool many = mine.pairs.size() > kFullScanPairs;
  if (many && !dense_.empty()) {
    size_t visited = 0;
    mine.next = dense_.visit(port, static_cast<uint32_t>(mine.next), [&](uint32_t pair, uint32_t partner) {
      if (best == kNone || chunks_[partner] >= most.first)
        consider(pair, partner);
      return ++visited >= kMinVisited && good();
    });
    if (cached && !good())
      mine.maxChunksLeft = best == kNone ? INT64_MAX : most.first;
    return best;
  }
  size_t done = 0, at = many ? mine.next % mine.pairs.size() : 0;
  for (size_t i = 0; i < mine.pairs.size(); ++i, at = at + 1 == mine.pairs.size() ? 0 : at + 1) {
    done += leftOf_[mine.pairs[at]] == 0;
    consider(mine.pairs[at], mine.partners[at]);
    if (many && best == mine.pairs[at] && good()) {
      mine.next = at + 1;
      break;
    }
  }
  if (cached && !good()) // the scan was full
    mine.maxChunksLeft = best == kNone ? INT64_MAX : most.first;
  if (done > 0 && (!many || 2 * done > mine.pairs.size()))
    removeDone(mine);
  return best;
}

void Tier::removeDone(Port &port) {
  size_t tail = 0;
  for (size_t i = 0; i < port.pairs.size(); ++i)
    if (leftOf_[port.pairs[i]] > 0) {
      port.pairs[tail] = port.pairs[i];
      port.partners[tail++] = port.partners[i];
    }
  port.pairs.resize(tail);
  port.partners.resize(tail);
}

void Tier::augment(uint32_t start) {
  struct Step {
    uint32_t port; // on the side of `start`
    uint32_t pair; // the pair with which the port before takes over this port's partner
    size_t before; // index of the step before
  };
  std::vector<Step> steps = {{start, kNone, 0}};
  ++search_;
  size_t visited = 0;
  for (size_t at = 0; at < steps.size() && visited < kMaxSearchPairs; ++at) {
    const Port &mine = ports_[steps[at].port];
    visited += mine.pairs.size();
    uint32_t best = kNone;
    int64_t least = chunks_[start];
    for (size_t i = 0; i < mine.pairs.size(); ++i) {
      const uint32_t candidate = mine.pairs[i], partner = mine.partners[i], holding = mates_[partner];
      if (candidate == holding || ports_[partner].search == search_ || readyOf_[candidate] == 0)
        continue;
      ports_[partner].search = search_;
      const uint32_t rival = holding == kNone ? kNone : other(ports_[partner], pairs_[holding]);
      const int64_t left = rival == kNone ? -1 : chunks_[rival];
      if (left < least) {
        least = left;
        best = candidate;
      } else if (left == chunks_[start]) {
        steps.push_back({rival, candidate, at});
      }
    }
    if (best == kNone)
      continue;
    take(best);
    for (size_t back = at; back > 0; back = steps[back].before)
      take(steps[back].pair);
    return;
  }
}

void Tier::take(uint32_t pair) {
  for (uint32_t port : {pairs_[pair].out, pairs_[pair].in}) {
    if (mates_[port] != kNone)
      release(mates_[port]);
    mates_[port] = pair;
    setIdle(port, false);
  }
  if (pairs_[pair].slot == kNone) {
    pairs_[pair].slot = static_cast<uint32_t>(active_.size());
    active_.push_back({pair, pairs_[pair].out, pairs_[pair].in});
  }
}

void Tier::plan(Active &active) {
  Pair &pair = pairs_[active.pair];
  const QueuedHop &queued = pair.queue[pair.current];
  if (pair.message == kNone || queued.forwarded)
    return;
  pair.planned = active.pending =
      std::max<int64_t>(0, queued.readyFor(messages_[pair.message].round) - queued.sent) / bytes_;
}

void Tier::sync(uint32_t number) {
  Pair &pair = pairs_[number];
  if (pair.planned == 0)
    return;
  Active &active = active_[pair.slot];
  const int64_t bytes = (pair.planned - active.pending) * bytes_;
  pair.planned = active.pending = 0;
  if (bytes == 0)
    return;
  QueuedHop &queued = pair.queue[pair.current];
  queued.sent += bytes;
  readyOf_[number] -= bytes;
  setLeft(pair, left(pair) - bytes);
  pair.lastChunk = bytes_;
  Message &message = messages_[pair.message];
  message.bytes += bytes;
  message.grants.back().end = queued.sent;
}

void Tier::release(uint32_t number) {
  sync(number);
  Pair &pair = pairs_[number];
  for (uint32_t port : {pair.out, pair.in}) {
    mates_[port] = kNone;
    free_.push_back(port);
    setIdle(port, true);
  }
  if (pair.message == kNone)
    return;
  Message &message = messages_[pair.message];
  pair.message = kNone;
  Grant &last = message.grants.back();
  QueuedHop &queued = pair.queue[pair.current];
  if (queued.sent == queued.ready)
    return;
  const int64_t end = cuts_.best(last.flow, std::max(last.begin, last.end - pair.lastChunk), last.end);
  const int64_t back = last.end - end;
  queued.sent = last.end = end;
  message.bytes -= back;
  readyOf_[number] += back;
  change(pair, back);
  if (last.begin == last.end)
    message.grants.pop_back();
}

void Tier::send(Active &active, uint32_t round, std::vector<RelayArrival> &arrivals) {
  Pair &pair = pairs_[active.pair];
  if (pair.message != kNone && !addChunk(pair, round, arrivals))
    pair.message = kNone;
  if (pair.message == kNone) {
    pair.message = static_cast<uint32_t>(messages_.size());
    messages_.push_back({round, rounds_, pair.from, pair.to, 0, bytes_, {}});
    addChunk(pair, round, arrivals);
    if (relays_)
      active.turn = round + turn(pair);
  }
  if (pair.lastChunk < bytes_) // only the last chunk of a message may be shorter
    pair.message = kNone;
  while (pair.first < pair.queue.size() && pair.queue[pair.first].sent == pair.queue[pair.first].bytes)
    ++pair.first;
  plan(active);
}

bool Tier::addChunk(Pair &pair, uint32_t round, std::vector<RelayArrival> &arrivals) {
  Message &message = messages_[pair.message];
  pair.lastChunk = 0;
  // Continue the current hop first, because the end of a chunk can be inside an element; then the others in order.
  for (size_t next = pair.current, i = pair.first; next < pair.queue.size() && pair.lastChunk < bytes_; next = i++) {
    QueuedHop &queued = pair.queue[next];
    const int64_t bytes = std::min(bytes_ - pair.lastChunk, queued.readyFor(message.round) - queued.sent);
    if (bytes <= 0)
      continue;
    pair.current = next;
    if (message.grants.empty() || message.grants.back().flow != queued.flow || message.grants.back().hop != queued.hop)
      message.grants.push_back({queued.flow, queued.hop, queued.sent, queued.sent});
    queued.sent += bytes;
    pair.lastChunk += bytes;
    message.grants.back().end = queued.sent;
    if (queued.forwarded)
      arrivals.push_back({round + 2 * rounds_, pair.message, message.grants.size() - 1, queued.sent});
  }
  message.bytes += pair.lastChunk;
  readyOf_[numberOf(pair)] -= pair.lastChunk;
  change(pair, -pair.lastChunk);
  return pair.lastChunk > 0;
}

/// A hop, its index in the queue of its pair, and the hops that follow it.
struct HopNode {
  bool local = false;
  uint32_t pair = 0;
  size_t queued = 0;
  uint32_t depth = 0;                      // hops after it on the longest route
  uint32_t child = kNone, sibling = kNone; // the first hop after it, and the next with the same `after`
};

/// The nodes of all hops of all flows.
class HopNodes {
public:
  explicit HopNodes(llvm::ArrayRef<Flow> flows) {
    for (const Flow &flow : flows) {
      first_.push_back(nodes_.size());
      nodes_.resize(nodes_.size() + flow.hops.size());
      HopNode *hopNodes = nodes_.data() + first_.back();
      for (uint32_t h = static_cast<uint32_t>(flow.hops.size()); h-- > 0;)
        if (const int32_t before = flow.hops[h].after; before >= 0) {
          hopNodes[before].depth = std::max(hopNodes[before].depth, hopNodes[h].depth + 1);
          hopNodes[h].sibling = hopNodes[before].child;
          hopNodes[before].child = h;
        }
    }
  }
  HopNode &operator()(uint32_t flow, uint32_t hop) { return nodes_[first_[flow] + hop]; }

private:
  std::vector<HopNode> nodes_;
  std::vector<size_t> first_; // by flow
};

/// The steps of assignRounds() and their state.
class RoundAssignment {
public:
  RoundAssignment(llvm::ArrayRef<Flow> flows, const ir::Topology &topology, const RoundLimits &limits, const Cuts &cuts)
      : flows_(flows), topology_(topology),
        relays_(std::any_of(flows.begin(), flows.end(), [](const Flow &flow) { return flow.hops.size() > 1; })),
        internode_(limits.internodeBytes, limits.internodeRounds, relays_, messages_, cuts),
        intranode_(limits.intranodeBytes, 1, relays_, messages_, cuts), hopNodes_(flows) {}

  std::vector<Message> run() {
    enqueue();
    for (uint32_t round = 0; !internode_.done() || !intranode_.done(); ++round) {
      forward(round);
      internode_.begin(round, arrivals_);
      intranode_.begin(round, arrivals_);
    }
    finish();
    return std::move(messages_);
  }

private:
  /// Puts each hop into the queue of its pair, the hop with the longest remaining route first.
  void enqueue() {
    std::vector<std::pair<uint32_t, uint32_t>> all; // flow, hop
    for (uint32_t s = 0; s < flows_.size(); ++s)
      for (uint32_t h = 0; h < flows_[s].hops.size(); ++h)
        if (flows_[s].bytes > 0)
          all.emplace_back(s, h);
    sortUnlessSorted(all, [&](const auto &a, const auto &b) {
      return hopNodes_(a.first, a.second).depth > hopNodes_(b.first, b.second).depth;
    });
    for (const auto &[s, h] : all) {
      const Flow::Hop &hop = flows_[s].hops[h];
      HopNode &node = hopNodes_(s, h);
      node.local = topology_.node(hop.from) == topology_.node(hop.to);
      Tier &tier = node.local ? intranode_ : internode_;
      node.pair = tier.pair(hop.from, hop.to);
      node.queued = tier.enqueue(node.pair, s, h, node.child != kNone, flows_[s].bytes);
      if (hop.after < 0)
        tier.makeReady(node.pair, node.queued, flows_[s].bytes, 0);
    }
    internode_.finishQueues();
    intranode_.finishQueues();
    messages_.reserve(internode_.pairs() + intranode_.pairs()); // each pair sends one or more
  }

  /// Allows the hops that follow to send the bytes that arrived by this round (kParts).
  void forward(uint32_t round) {
    later_.clear();
    for (const RelayArrival &arrival : arrivals_) {
      if (arrival.round > round) {
        later_.push_back(arrival);
        continue;
      }
      const Message &message = messages_[arrival.message];
      if (arrival.grant >= message.grants.size()) // release() removed it
        continue;
      const Grant &grant = message.grants[arrival.grant];
      const uint32_t first = hopNodes_(grant.flow, grant.hop).child;
      const bool several = hopNodes_(grant.flow, first).sibling != kNone;
      for (uint32_t h = first; h != kNone; h = hopNodes_(grant.flow, h).sibling) {
        const HopNode &node = hopNodes_(grant.flow, h);
        const int64_t least =
            several && node.local && node.depth == 0
                ? std::max(flows_[grant.flow].bytes, internode_.bytesToReceive(flows_[grant.flow].hops[h].from)) /
                      kParts
                : 0;
        (node.local ? intranode_ : internode_)
            .makeReady(node.pair, node.queued, std::min(arrival.end, grant.end), least, message.round);
      }
    }
    arrivals_.swap(later_);
  }

  /// Sets the rounds and the chunk of each message, and sorts them.
  void finish() {
    std::erase_if(messages_, [](const Message &message) { return message.bytes == 0; });
    for (Message &message : messages_) {
      const int64_t chunks = (message.bytes + message.chunk - 1) / message.chunk;
      message.rounds *= static_cast<uint32_t>(chunks);
      if (chunks == 1)
        message.chunk = 0;
      else if (!relays_) // chunks of equal size; else the last one would be short, and its round not fully used
        message.chunk = alignUp((message.bytes + chunks - 1) / chunks);
    }
    for (auto first = messages_.begin(), last = first; first != messages_.end(); first = last) { // rounds ascend
      while (last != messages_.end() && last->round == first->round)
        ++last;
      std::sort(first, last,
                [](const Message &a, const Message &b) { return std::tie(a.from, a.to) < std::tie(b.from, b.to); });
    }
  }

  llvm::ArrayRef<Flow> flows_;
  const ir::Topology &topology_;
  const bool relays_;
  std::vector<Message> messages_;
  Tier internode_, intranode_;
  HopNodes hopNodes_;
  std::vector<RelayArrival> arrivals_, later_;
};

} // namespace

std::vector<Message> assignRounds(llvm::ArrayRef<Flow> flows, const ir::Topology &topology, const RoundLimits &limits,
                                  const Cuts &cuts) {
  return RoundAssignment(flows, topology, limits, cuts).run();
}

} // namespace reshard
