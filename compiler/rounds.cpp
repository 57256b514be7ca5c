#include "compiler/rounds.h"

#include "compiler/staging.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace reshard {

namespace {

constexpr uint32_t kNone = UINT32_MAX;

/// What leaves a node's entry for several ranks beside it, and goes no further, waits until there is an eighth of it:
/// else the entry would change from one to the next with every chunk, and only the last part's delay counts.
constexpr int64_t kBatches = 8;

/// A turn that began in round r may last r / kTurns rounds where another pair waits.
constexpr uint32_t kTurns = 2;

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
  bool sends = true;
  uint64_t search = 0;         // the last one that came by
  std::vector<uint32_t> pairs; // open ones
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

  uint32_t pair(int32_t from, int32_t to) {
    const auto [at, added] = pairOf_.try_emplace(key(from, to), static_cast<uint32_t>(pairs_.size()));
    if (added) {
      pairs_.push_back({from, to, port(from, true), port(to, false), {}});
      ports_[pairs_.back().out].pairs.push_back(at->second);
      ports_[pairs_.back().in].pairs.push_back(at->second);
    }
    return at->second;
  }

  /// Queues a hop; returns its place in the queue.
  size_t add(uint32_t pair, uint32_t stream, uint32_t hop, bool goesOn, int64_t bytes) {
    Pair &p = pairs_[pair];
    p.items.push_back({stream, hop, goesOn, bytes, 0, 0, {}});
    change(p, bytes);
    return p.items.size() - 1;
  }

  /// Lets an item go up to `upTo`, in parts of `least` bytes or more, cut where that is best. What is passed on came
  /// with a message that began in round `brought`.
  void makeReady(uint32_t pair, size_t item, int64_t upTo, int64_t least, uint32_t brought = kNone) {
    Pair &p = pairs_[pair];
    Item &i = p.items[item];
    if (upTo - i.ready < std::min(least, i.bytes - i.ready))
      return;
    if (upTo < i.bytes && (least > 0 || !cuts_.possible(i.stream, upTo)))
      upTo = cuts_.best(i.stream, i.ready, upTo);
    if (upTo <= i.ready)
      return;
    if (p.ready == 0) {
      free_.push_back(p.out);
      free_.push_back(p.in);
    }
    p.ready += upTo - i.ready;
    i.ready = upTo;
    if (brought == kNone)
      return;
    if (i.brought.empty() || i.brought.back().second != brought)
      i.brought.emplace_back(upTo, brought);
    i.brought.back().first = upTo;
  }

  bool done() const { return left_ == 0; }

  /// The chunks that begin in a round; what they bring is added to `arrivals`. Most are one more of what goes on
  /// anyway: such a pair says how many there will be, and until then nothing but the counters of its ports is touched,
  /// which with millions of chunks is most of the compiler's time. sync() makes up for it.
  void begin(uint32_t round, std::vector<Arrival> &arrivals) {
    if (round % rounds_ != 0 || left_ == 0)
      return;
    for (Active &each : active_) {
      if (mates_[each.out] != each.pair)
        continue;
      if (each.coming == 0)
        sync(each.pair);
      if ((each.coming == 0 && pairs_[each.pair].ready == 0) || (round >= each.turn && yields(each)))
        release(each.pair);
    }
    uint32_t kept = 0;
    for (const Active &each : active_) {
      const bool sends = mates_[each.out] == each.pair;
      pairs_[each.pair].slot = sends ? kept : kNone;
      if (sends)
        active_[kept++] = each;
    }
    active_.resize(kept);
    match();
    for (Active &each : active_) {
      if (mates_[each.out] != each.pair)
        continue;
      if (each.coming == 0) {
        send(each, round, arrivals);
        continue;
      }
      --each.coming;
      --chunks_[each.out];
      --chunks_[each.in];
    }
  }

private:
  static uint64_t key(int64_t a, int64_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint64_t>(b); }

  uint32_t port(int32_t rank, bool sends) {
    const auto [at, added] = portOf_.try_emplace(key(rank, sends), static_cast<uint32_t>(ports_.size()));
    if (added) {
      ports_.emplace_back();
      ports_.back().sends = sends;
      chunks_.push_back(0);
      mates_.push_back(kNone);
    }
    return at->second;
  }

  int64_t chunks(int64_t bytes) const { return (bytes + bytes_ - 1) / bytes_; }

  /// More or fewer bytes to go.
  void change(Pair &pair, int64_t by) {
    if (by == -bytes_) { // the rule, without a division
      pair.left -= bytes_;
      left_ -= bytes_;
      --chunks_[pair.out];
      --chunks_[pair.in];
      return;
    }
    const int64_t more = chunks(pair.left + by) - chunks(pair.left);
    pair.left += by;
    left_ += by;
    chunks_[pair.out] += more;
    chunks_[pair.in] += more;
  }

  uint32_t other(const Port &port, const Pair &pair) const { return port.sends ? pair.in : pair.out; }

  /// Ports that came free choose, those with most left first; then a port with as much left as any that has nobody
  /// takes a partner from one with less.
  void match() {
    fill();
    const int64_t most = *std::max_element(chunks_.begin(), chunks_.end());
    for (uint32_t p = 0; p < ports_.size(); ++p)
      if (chunks_[p] == most && mates_[p] == kNone)
        augment(p);
    fill();
  }

  /// Rounds of a turn of the message that a pair sends.
  uint32_t turn(const Pair &pair) const {
    return pair.message == kNone ? rounds_ : std::max(1u, messages_[pair.message].round / kTurns / rounds_) * rounds_;
  }

  /// Whether a pair makes room for another one that has waited for more, so that what goes on from rank to rank is soon
  /// everywhere: the longer all goes on, the longer each turn.
  bool yields(Active &active) {
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

  void fill() {
    std::sort(free_.begin(), free_.end());
    free_.erase(std::unique(free_.begin(), free_.end()), free_.end());
    std::stable_sort(free_.begin(), free_.end(), [&](uint32_t a, uint32_t b) { return chunks_[a] > chunks_[b]; });
    for (uint32_t p : free_)
      if (mates_[p] == kNone)
        if (const uint32_t pair = choose(ports_[p]); pair != kNone)
          take(pair);
    free_.clear();
  }

  /// The best pair with a free partner.
  uint32_t choose(Port &mine) {
    std::erase_if(mine.pairs, [&](uint32_t pair) { return pairs_[pair].left == 0; });
    uint32_t best = kNone;
    auto merit = [&](uint32_t pair) { return std::make_pair(chunks_[other(mine, pairs_[pair])], pairs_[pair].left); };
    for (uint32_t candidate : mine.pairs)
      if (pairs_[candidate].ready > 0 && mates_[other(mine, pairs_[candidate])] == kNone &&
          (best == kNone || merit(candidate) > merit(best)))
        best = candidate;
    return best;
  }

  /// Looks, breadth first, for a way on which partners change hands: from `start` to a free partner, or to a port that
  /// may go empty instead since it has less left, the least of those as near (Berge; the ports with most can all be
  /// served, by König's theorem, where everything is ready).
  void augment(uint32_t start) {
    struct Step {
      uint32_t port; // on the side of `start`
      uint32_t pair; // by which its predecessor would take this port's partner
      size_t before;
    };
    std::vector<Step> steps = {{start, kNone, 0}};
    ++search_;
    for (size_t at = 0; at < steps.size(); ++at) {
      const Port &mine = ports_[steps[at].port];
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

  void take(uint32_t pair) {
    for (uint32_t port : {pairs_[pair].out, pairs_[pair].in}) {
      if (mates_[port] != kNone)
        release(mates_[port]);
      mates_[port] = pair;
    }
    if (pairs_[pair].slot == kNone) {
      pairs_[pair].slot = static_cast<uint32_t>(active_.size());
      active_.push_back({pair, pairs_[pair].out, pairs_[pair].in});
    }
  }

  /// Plans the chunks that can follow without another look: of the item under way, that does not go on from where it
  /// comes to, since what waits for it must hear of every chunk.
  void plan(Active &active) {
    Pair &pair = pairs_[active.pair];
    const Item &item = pair.items[pair.current];
    if (pair.message == kNone || item.goesOn)
      return;
    pair.planned = active.coming =
        std::max<int64_t>(0, item.readyFor(messages_[pair.message].round) - item.sent) / bytes_;
  }

  /// Enters the planned chunks that have gone since.
  void sync(uint32_t number) {
    Pair &pair = pairs_[number];
    if (pair.planned == 0)
      return;
    Active &active = active_[pair.slot];
    const int64_t bytes = (pair.planned - active.coming) * bytes_;
    pair.planned = active.coming = 0;
    if (bytes == 0)
      return;
    Item &item = pair.items[pair.current];
    item.sent += bytes;
    pair.ready -= bytes;
    pair.left -= bytes;
    left_ -= bytes;
    pair.given = bytes_;
    Message &message = messages_[pair.message];
    message.bytes += bytes;
    message.grants.back().end = item.sent;
  }

  /// Ends a pair's message. Where more of its last item could have gone, the end is moved to a good place.
  void release(uint32_t number) {
    sync(number);
    Pair &pair = pairs_[number];
    for (uint32_t port : {pair.out, pair.in}) {
      mates_[port] = kNone;
      free_.push_back(port);
    }
    if (pair.message == kNone)
      return;
    Message &message = messages_[pair.message];
    pair.message = kNone;
    Grant &last = message.grants.back();
    Item &item = pair.items[pair.current];
    if (item.sent == item.ready)
      return;
    const int64_t end = cuts_.best(last.stream, std::max(last.begin, last.end - pair.given), last.end);
    const int64_t back = last.end - end;
    item.sent = last.end = end;
    message.bytes -= back;
    pair.ready += back;
    change(pair, back);
    if (last.begin == last.end)
      message.grants.pop_back();
  }

  void send(Active &active, uint32_t round, std::vector<Arrival> &arrivals) {
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
    if (pair.given < bytes_) // the last chunk
      pair.message = kNone;
    while (pair.first < pair.items.size() && pair.items[pair.first].sent == pair.items[pair.first].bytes)
      ++pair.first;
    plan(active);
  }

  /// Adds a chunk to the pair's message; false: there is nothing that it may take.
  bool add(Pair &pair, uint32_t round, std::vector<Arrival> &arrivals) {
    Message &message = messages_[pair.message];
    pair.given = 0;
    // What is under way goes on, since the end of a chunk may part an element; then the others in order.
    for (size_t next = pair.current, i = pair.first; next < pair.items.size() && pair.given < bytes_; next = i++) {
      Item &item = pair.items[next];
      const int64_t bytes = std::min(bytes_ - pair.given, item.readyFor(message.round) - item.sent);
      if (bytes <= 0)
        continue;
      pair.current = next;
      if (message.grants.empty() || message.grants.back().stream != item.stream ||
          message.grants.back().hop != item.hop)
        message.grants.push_back({item.stream, item.hop, item.sent, item.sent});
      item.sent += bytes;
      pair.given += bytes;
      message.grants.back().end = item.sent;
      if (item.goesOn)
        arrivals.push_back({round + 2 * rounds_, pair.message, message.grants.size() - 1, item.sent});
    }
    message.bytes += pair.given;
    pair.ready -= pair.given;
    change(pair, -pair.given);
    return pair.given > 0;
  }

  const int64_t bytes_;
  const uint32_t rounds_; // that a chunk takes
  const bool relays_;
  std::vector<Message> &messages_;
  const Cuts &cuts_;
  std::vector<Pair> pairs_;
  std::vector<Port> ports_;
  std::vector<int64_t> chunks_; // of each port still to go, where every pair's bytes are cut into as few as may be
  std::vector<uint32_t> mates_; // the pair that has the port
  std::unordered_map<uint64_t, uint32_t> pairOf_, portOf_;
  std::vector<Active> active_;  // pairs that send, and some that were released
  std::vector<uint32_t> free_;  // ports that may find a partner
  uint64_t search_ = 0;         // searches for another partner so far
  int64_t left_ = 0;
};

/// A hop in the queues, and the hops that go on from it.
struct Place {
  bool local = false;
  uint32_t pair = 0;
  size_t item = 0;
  uint32_t depth = 0; // hops that come after it on the longest way
  uint32_t child = kNone, sibling = kNone;
};

/// Of all hops of all streams.
class Places {
public:
  explicit Places(llvm::ArrayRef<Stream> streams) {
    for (const Stream &stream : streams) {
      first_.push_back(places_.size());
      places_.resize(places_.size() + stream.hops.size());
      Place *places = places_.data() + first_.back();
      for (uint32_t h = static_cast<uint32_t>(stream.hops.size()); h-- > 0;)
        if (const int32_t before = stream.hops[h].after; before >= 0) {
          places[before].depth = std::max(places[before].depth, places[h].depth + 1);
          places[h].sibling = places[before].child;
          places[before].child = h;
        }
    }
  }
  Place &operator()(uint32_t stream, uint32_t hop) { return places_[first_[stream] + hop]; }

private:
  std::vector<Place> places_;
  std::vector<size_t> first_; // by stream
};

} // namespace

std::vector<Message> dealRounds(llvm::ArrayRef<Stream> streams, const ir::Topology &topology, const RoundLimits &limits,
                                const Cuts &cuts) {
  std::vector<Message> messages;
  const bool relays =
      std::any_of(streams.begin(), streams.end(), [](const Stream &stream) { return stream.hops.size() > 1; });
  Tier far(limits.bytes, limits.rounds, relays, messages, cuts), near(limits.localBytes, 1, relays, messages, cuts);
  Places places(streams);

  // What has furthest to go stands first in its pair's queue.
  std::vector<std::pair<uint32_t, uint32_t>> all;
  for (uint32_t s = 0; s < streams.size(); ++s)
    for (uint32_t h = 0; h < streams[s].hops.size(); ++h)
      if (streams[s].bytes > 0)
        all.emplace_back(s, h);
  std::stable_sort(all.begin(), all.end(), [&](const auto &a, const auto &b) {
    return places(a.first, a.second).depth > places(b.first, b.second).depth;
  });
  for (const auto &[s, h] : all) {
    const Stream::Hop &hop = streams[s].hops[h];
    Place &place = places(s, h);
    place.local = topology.node(hop.from) == topology.node(hop.to);
    Tier &tier = place.local ? near : far;
    place.pair = tier.pair(hop.from, hop.to);
    place.item = tier.add(place.pair, s, h, place.child != kNone, streams[s].bytes);
    if (hop.after < 0)
      tier.makeReady(place.pair, place.item, streams[s].bytes, 0);
  }

  std::vector<Arrival> arrivals, later;
  for (uint32_t round = 0; !far.done() || !near.done(); ++round) {
    later.clear();
    for (const Arrival &arrival : arrivals) {
      if (arrival.round > round) {
        later.push_back(arrival);
        continue;
      }
      if (arrival.grant >= messages[arrival.message].grants.size())
        continue;
      const Grant &grant = messages[arrival.message].grants[arrival.grant];
      const uint32_t first = places(grant.stream, grant.hop).child;
      const bool several = places(grant.stream, first).sibling != kNone;
      for (uint32_t h = first; h != kNone; h = places(grant.stream, h).sibling) {
        const Place &place = places(grant.stream, h);
        const int64_t least = several && place.local && place.depth == 0 ? streams[grant.stream].bytes / kBatches : 0;
        (place.local ? near : far)
            .makeReady(place.pair, place.item, std::min(arrival.end, grant.end), least,
                       messages[arrival.message].round);
      }
    }
    arrivals.swap(later);
    far.begin(round, arrivals);
    near.begin(round, arrivals);
  }

  std::erase_if(messages, [](const Message &message) { return message.bytes == 0; });
  for (Message &message : messages) {
    const int64_t chunks = (message.bytes + message.chunk - 1) / message.chunk;
    message.rounds *= static_cast<uint32_t>(chunks);
    if (chunks == 1)
      message.chunk = 0;
    else if (!relays) // equal ones, so that the last is not much shorter than what goes before and behind it
      message.chunk = staged((message.bytes + chunks - 1) / chunks);
  }
  std::sort(messages.begin(), messages.end(), [](const Message &a, const Message &b) {
    return std::tie(a.round, a.from, a.to) < std::tie(b.round, b.from, b.to);
  });
  return messages;
}

} // namespace reshard
