#include "compiler/schedule/rounds.h"

#include "compiler/transfer/staging.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace reshard {

namespace {

inline constexpr uint32_t kNone = UINT32_MAX;

/// One hop of one stream in the queue of its pair.
struct QueuedHop {
  uint32_t flow, hop;
  bool forwarded;                                             // from where it comes to
  int64_t bytes = 0;                                          // of the stream
  int64_t sent = 0, ready = 0;                                // of these, from the start
  llvm::SmallVector<std::pair<int64_t, uint32_t>, 1> arrived; // up to where, by messages that began in which round

  /// What a message that began in `round` may take: what earlier ones bring, so that steps can wait for steps.
  int64_t readyFor(uint32_t round) const {
    if (arrived.empty() || arrived.back().second < round)
      return ready;
    const auto end =
        std::partition_point(arrived.begin(), arrived.end(), [&](const auto &each) { return each.second < round; });
    return end == arrived.begin() ? 0 : std::prev(end)->first;
  }
};

struct Pair {
  int32_t from, to; // ranks
  uint32_t out, in; // ports of the tier
  std::vector<QueuedHop> queue;
  size_t first = 0;         // items before it are done
  size_t current = 0;       // the one that sent last
  int64_t ready = 0;        // bytes that could go now
  int64_t left = 0;         // bytes to go
  int64_t lastChunk = 0;    // bytes of its last chunk
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
  int64_t pending = 0;   // of the chunks that it planned, those to come
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
  size_t add(uint32_t pair, uint32_t flow, uint32_t hop, bool forwarded, int64_t bytes);

  /// Lets an item go up to `upTo`, in parts of `least` bytes or more, cut where that is best. What is passed on came
  /// with a message that began in round `brought`.
  void makeReady(uint32_t pair, size_t queued, int64_t upTo, int64_t least, uint32_t arrived = kNone);

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

} // namespace

namespace {

/// A turn that began in round r may last r / kTurns rounds where another pair waits.
constexpr uint32_t kTurns = 2;

/// A port with more partners takes the first that has nearly as much left as any, without a look at the others: with
/// all of them alike, as between shards and shards, looking at all would be most of the time.
constexpr size_t kFew = 64;
/// One with so many takes the first that has as much left as the best had when it last looked at all: a rank that sends
/// to each of very many would look at all of them for each.
constexpr size_t kVeryMany = 1 << 12;
/// Looking up a pair costs as much as passing so many.
constexpr size_t kLookup = 8;
/// Pairs that one search for another partner looks at.
constexpr size_t kMostLooks = 1 << 14;

uint64_t key(int64_t a, int64_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint64_t>(b); }

} // namespace

uint32_t Tier::pair(int32_t from, int32_t to) {
  const auto [at, added] = pairOf_.try_emplace(key(from, to), static_cast<uint32_t>(pairs_.size()));
  if (added) {
    pairs_.push_back({from, to, port(from, true), port(to, false), {}});
    ports_[pairs_.back().out].pairs.push_back(at->second);
    ports_[pairs_.back().in].pairs.push_back(at->second);
  }
  return at->second;
}

size_t Tier::add(uint32_t pair, uint32_t flow, uint32_t hop, bool forwarded, int64_t bytes) {
  Pair &p = pairs_[pair];
  p.queue.push_back({flow, hop, forwarded, bytes, 0, 0, {}});
  change(p, bytes);
  return p.queue.size() - 1;
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
  if (p.ready == 0) {
    free_.push_back(p.out);
    free_.push_back(p.in);
  }
  p.ready += upTo - i.ready;
  i.ready = upTo;
  if (arrived == kNone)
    return;
  if (i.arrived.empty() || i.arrived.back().second != arrived)
    i.arrived.emplace_back(upTo, arrived);
  i.arrived.back().first = upTo;
}

void Tier::begin(uint32_t round, std::vector<Arrival> &arrivals) {
  if (round % rounds_ != 0 || left_ == 0)
    return;
  for (Active &each : active_) {
    if (mates_[each.out] != each.pair)
      continue;
    if (each.pending == 0)
      sync(each.pair);
    if ((each.pending == 0 && pairs_[each.pair].ready == 0) || (round >= each.turn && yields(each)))
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
  if (by == -bytes_) { // the rule, without a division
    pair.left -= bytes_;
    left_ -= bytes_;
    countDown(pair.out);
    countDown(pair.in);
    return;
  }
  const int64_t more = chunks(pair.left + by) - chunks(pair.left);
  pair.left += by;
  left_ += by;
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
    return rival.ready > 0 && mates_[rival.in] == kNone && chunks_[rival.in] > chunks_[pair.in];
  });
}

void Tier::fill() {
  std::sort(free_.begin(), free_.end());
  free_.erase(std::unique(free_.begin(), free_.end()), free_.end());
  std::stable_sort(free_.begin(), free_.end(), [&](uint32_t a, uint32_t b) { return chunks_[a] > chunks_[b]; });
  for (uint32_t p : free_)
    if (mates_[p] == kNone)
      if (const uint32_t pair = choose(p); pair != kNone)
        take(pair);
  free_.clear();
}

uint32_t Tier::choose(uint32_t port) {
  Port &mine = ports_[port];
  uint32_t best = kNone;
  auto merit = [&](uint32_t pair) { return std::make_pair(chunks_[other(mine, pairs_[pair])], pairs_[pair].left); };
  auto consider = [&](uint32_t candidate) {
    const Pair &pair = pairs_[candidate];
    if (pair.ready > 0 && mates_[other(mine, pair)] == kNone && (best == kNone || merit(candidate) > merit(best)))
      best = candidate;
  };
  const bool veryMany = mine.pairs.size() > kVeryMany;
  auto good = [&](uint32_t pair) {
    const int64_t left = chunks_[other(mine, pairs_[pair])];
    return left >= most_ - most_ / 8 || (veryMany && left >= mine.most);
  };
  // Where few are idle, they are looked at; else its own pairs.
  const std::vector<uint32_t> &idle = idle_[!mine.sends];
  if (idle.size() * kLookup < mine.pairs.size()) {
    for (size_t i = 0; i < idle.size() && !(best != kNone && good(best)); ++i) {
      const uint32_t partner = idle[i];
      const int32_t rank = ports_[partner].rank;
      if (const auto pair = pairOf_.find(mine.sends ? key(mine.rank, rank) : key(rank, mine.rank));
          pair != pairOf_.end())
        consider(pair->second);
    }
    return best;
  }
  const bool many = mine.pairs.size() > kFew;
  size_t done = 0;
  for (size_t i = 0; i < mine.pairs.size(); ++i) {
    const size_t at = many ? (mine.next + i) % mine.pairs.size() : i;
    done += pairs_[mine.pairs[at]].left == 0;
    consider(mine.pairs[at]);
    if (many && best == mine.pairs[at] && good(best)) {
      mine.next = at + 1;
      break;
    }
  }
  if (veryMany && !(best != kNone && good(best))) // it has looked at all
    mine.most = best == kNone ? INT64_MAX : chunks_[other(mine, pairs_[best])];
  if (!many || 2 * done > mine.pairs.size())
    std::erase_if(mine.pairs, [&](uint32_t pair) { return pairs_[pair].left == 0; });
  return best;
}

void Tier::augment(uint32_t start) {
  struct Step {
    uint32_t port; // on the side of `start`
    uint32_t pair; // by which its predecessor would take this port's partner
    size_t before;
  };
  std::vector<Step> steps = {{start, kNone, 0}};
  ++search_;
  size_t looks = 0;
  for (size_t at = 0; at < steps.size() && looks < kMostLooks; ++at) {
    const Port &mine = ports_[steps[at].port];
    looks += mine.pairs.size();
    uint32_t best = kNone;
    int64_t least = chunks_[start];
    for (uint32_t candidate : mine.pairs) {
      const Pair &pair = pairs_[candidate];
      const uint32_t partner = other(mine, pair), holding = mates_[partner];
      if (pair.ready == 0 || candidate == holding || ports_[partner].search == search_)
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
  pair.ready -= bytes;
  pair.left -= bytes;
  left_ -= bytes;
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
  pair.ready += back;
  change(pair, back);
  if (last.begin == last.end)
    message.grants.pop_back();
}

void Tier::send(Active &active, uint32_t round, std::vector<Arrival> &arrivals) {
  Pair &pair = pairs_[active.pair];
  if (pair.message != kNone && !add(pair, round, arrivals))
    pair.message = kNone;
  if (pair.message == kNone) {
    pair.message = static_cast<uint32_t>(messages_.size());
    messages_.push_back({round, rounds_, pair.from, pair.to, 0, bytes_, {}});
    add(pair, round, arrivals);
    if (relays_)
      active.turn = round + turn(pair);
  }
  if (pair.lastChunk < bytes_) // the last chunk
    pair.message = kNone;
  while (pair.first < pair.queue.size() && pair.queue[pair.first].sent == pair.queue[pair.first].bytes)
    ++pair.first;
  plan(active);
}

bool Tier::add(Pair &pair, uint32_t round, std::vector<Arrival> &arrivals) {
  Message &message = messages_[pair.message];
  pair.lastChunk = 0;
  // What is under way goes on, since the end of a chunk may part an element; then the others in order.
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
  pair.ready -= pair.lastChunk;
  change(pair, -pair.lastChunk);
  return pair.lastChunk > 0;
}

namespace {

/// What leaves a node's entry for several ranks beside it, and goes no further, waits until there is an eighth of it:
/// else the entry would change from one to the next with every chunk, and only the last part's delay counts.
constexpr int64_t kBatches = 8;

/// A hop in the queues, and the hops that go on from it.
struct HopNode {
  bool local = false;
  uint32_t pair = 0;
  size_t queued = 0;
  uint32_t depth = 0; // hops that come after it on the longest way
  uint32_t child = kNone, sibling = kNone;
};

/// Of all hops of all streams.
class HopNodes {
public:
  explicit HopNodes(llvm::ArrayRef<Stream> flows) {
    for (const Stream &flow : flows) {
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
  std::vector<size_t> first_; // by stream
};

} // namespace

std::vector<Message> assignRounds(llvm::ArrayRef<Stream> flows, const ir::Topology &topology, const RoundLimits &limits,
                                  const Cuts &cuts) {
  std::vector<Message> messages;
  const bool relays = std::any_of(flows.begin(), flows.end(), [](const Stream &flow) { return flow.hops.size() > 1; });
  Tier internode(limits.internodeBytes, limits.internodeRounds, relays, messages, cuts),
      intranode(limits.intranodeBytes, 1, relays, messages, cuts);
  HopNodes hopNodes(flows);

  // What has furthest to go stands first in its pair's queue.
  std::vector<std::pair<uint32_t, uint32_t>> all;
  for (uint32_t s = 0; s < flows.size(); ++s)
    for (uint32_t h = 0; h < flows[s].hops.size(); ++h)
      if (flows[s].bytes > 0)
        all.emplace_back(s, h);
  std::stable_sort(all.begin(), all.end(), [&](const auto &a, const auto &b) {
    return hopNodes(a.first, a.second).depth > hopNodes(b.first, b.second).depth;
  });
  for (const auto &[s, h] : all) {
    const Stream::Hop &hop = flows[s].hops[h];
    HopNode &node = hopNodes(s, h);
    node.local = topology.node(hop.from) == topology.node(hop.to);
    Tier &tier = node.local ? intranode : internode;
    node.pair = tier.pair(hop.from, hop.to);
    node.queued = tier.add(node.pair, s, h, node.child != kNone, flows[s].bytes);
    if (hop.after < 0)
      tier.makeReady(node.pair, node.queued, flows[s].bytes, 0);
  }

  std::vector<Arrival> arrivals, later;
  for (uint32_t round = 0; !internode.done() || !intranode.done(); ++round) {
    later.clear();
    for (const Arrival &arrival : arrivals) {
      if (arrival.round > round) {
        later.push_back(arrival);
        continue;
      }
      if (arrival.grant >= messages[arrival.message].grants.size())
        continue;
      const Grant &grant = messages[arrival.message].grants[arrival.grant];
      const uint32_t first = hopNodes(grant.flow, grant.hop).child;
      const bool several = hopNodes(grant.flow, first).sibling != kNone;
      for (uint32_t h = first; h != kNone; h = hopNodes(grant.flow, h).sibling) {
        const HopNode &node = hopNodes(grant.flow, h);
        const int64_t least = several && node.local && node.depth == 0 ? flows[grant.flow].bytes / kBatches : 0;
        (node.local ? intranode : internode)
            .makeReady(node.pair, node.queued, std::min(arrival.end, grant.end), least,
                       messages[arrival.message].round);
      }
    }
    arrivals.swap(later);
    internode.begin(round, arrivals);
    intranode.begin(round, arrivals);
  }

  std::erase_if(messages, [](const Message &message) { return message.bytes == 0; });
  for (Message &message : messages) {
    const int64_t chunks = (message.bytes + message.chunk - 1) / message.chunk;
    message.rounds *= static_cast<uint32_t>(chunks);
    if (chunks == 1)
      message.chunk = 0;
    else if (!relays) // equal ones, so that the last is not much shorter than what goes before and behind it
      message.chunk = alignUp((message.bytes + chunks - 1) / chunks);
  }
  std::sort(messages.begin(), messages.end(), [](const Message &a, const Message &b) {
    return std::tie(a.round, a.from, a.to) < std::tie(b.round, b.from, b.to);
  });
  return messages;
}

} // namespace reshard
