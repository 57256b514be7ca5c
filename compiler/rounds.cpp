#include "compiler/rounds.h"

#include <algorithm>
#include <array>
#include <map>

namespace reshard {

namespace {

/// Rounds between the receipt of bytes and the first that may send them on.
constexpr uint32_t kTurnaround = 2;

/// One hop of one stream in the queue of its pair.
struct Item {
  uint32_t stream, hop;
  int64_t bytes = 0;           // of the stream
  int64_t sent = 0, ready = 0; // of these, from the start
};

struct Pair {
  int32_t from, to; // ranks
  uint32_t out, in; // ports of the tier
  std::vector<Item> items;
  size_t first = 0;           // items before it are done
  int64_t ready = 0;          // bytes that could go now
  int64_t left = 0;           // bytes to go
  uint32_t busy = UINT32_MAX; // the last round it had a message in
  int64_t given = 0;          // bytes in that message
};

constexpr uint32_t kNone = UINT32_MAX;

/// One end of a NIC or of a rank's link.
struct Port {
  int64_t messages = 0; // still to go, where every pair's bytes are cut into as few as may be
  bool sends = true;
  uint32_t mate = kNone;       // the pair that has it in this round
  uint64_t search = 0;         // the last one that came by
  std::vector<uint32_t> pairs; // open ones
};

class Tier {
public:
  Tier(int64_t bytes, int turns) : bytes_(bytes), turns_(turns) {}

  uint32_t pair(int32_t from, int32_t to, int64_t out, int64_t in) {
    const auto [at, added] = pairOf_.try_emplace({from, to}, static_cast<uint32_t>(pairs_.size()));
    if (added) {
      pairs_.push_back({from, to, port(out, true), port(in, false), {}});
      ports_[pairs_.back().out].pairs.push_back(at->second);
      ports_[pairs_.back().in].pairs.push_back(at->second);
    }
    return at->second;
  }

  /// Queues a hop; returns its place in the queue.
  size_t add(uint32_t pair, uint32_t stream, uint32_t hop, int64_t bytes) {
    Pair &p = pairs_[pair];
    p.items.push_back({stream, hop, bytes});
    change(p, bytes);
    return p.items.size() - 1;
  }

  void makeReady(uint32_t pair, size_t item, int64_t upTo) {
    Pair &p = pairs_[pair];
    p.ready += upTo - p.items[item].ready;
    p.items[item].ready = upTo;
  }

  bool done() const { return left_ == 0; }

  /// One round: `give(item, room)` for all that goes in it; it says how many bytes go.
  template <class Give> void round(uint32_t number, Give give) {
    for (int turn = 0; turn < turns_ && left_ > 0; ++turn) {
      match(number);
      bool any = false;
      for (uint32_t p : order_)
        if (ports_[p].sends && ports_[p].mate != kNone) {
          send(pairs_[ports_[p].mate], number, give);
          any = true;
        }
      if (!any)
        break;
    }
  }

private:
  uint32_t port(int64_t number, bool sends) {
    const auto [at, added] = portOf_.try_emplace({number, sends}, static_cast<uint32_t>(ports_.size()));
    if (added) {
      ports_.emplace_back();
      ports_.back().sends = sends;
    }
    return at->second;
  }

  int64_t messages(int64_t bytes) const { return (bytes + bytes_ - 1) / bytes_; }

  /// More or fewer bytes to go.
  void change(Pair &pair, int64_t by) {
    const int64_t more = messages(pair.left + by) - messages(pair.left);
    pair.left += by;
    left_ += by;
    ports_[pair.out].messages += more;
    ports_[pair.in].messages += more;
  }

  uint32_t other(const Port &port, const Pair &pair) const { return port.sends ? pair.in : pair.out; }

  /// Chooses pairs, at most one for each port: the ports with most messages to go choose first, the partner with most.
  /// A port with as many as any that comes away empty takes a partner from one with fewer.
  void match(uint32_t round) {
    order_.clear();
    for (uint32_t p = 0; p < ports_.size(); ++p) {
      ports_[p].mate = kNone;
      if (ports_[p].messages > 0)
        order_.push_back(p);
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](uint32_t a, uint32_t b) { return ports_[a].messages > ports_[b].messages; });
    for (uint32_t p : order_)
      if (ports_[p].mate == kNone)
        if (const uint32_t pair = choose(ports_[p], round); pair != kNone)
          take(pair);
    for (uint32_t p : order_) {
      if (ports_[p].messages < ports_[order_[0]].messages)
        break;
      if (ports_[p].mate == kNone)
        augment(p, round);
    }
  }

  bool open(const Pair &pair, uint32_t round) const {
    return pair.ready > 0 && (pair.busy != round || pair.given < bytes_ * turns_);
  }

  /// The best pair with a free partner.
  uint32_t choose(Port &mine, uint32_t round) {
    std::erase_if(mine.pairs, [&](uint32_t pair) { return pairs_[pair].left == 0; });
    uint32_t best = kNone;
    auto merit = [&](uint32_t pair) {
      return std::make_pair(ports_[other(mine, pairs_[pair])].messages, pairs_[pair].left);
    };
    for (uint32_t candidate : mine.pairs)
      if (open(pairs_[candidate], round) && ports_[other(mine, pairs_[candidate])].mate == kNone &&
          (best == kNone || merit(candidate) > merit(best)))
        best = candidate;
    return best;
  }

  /// Looks, breadth first, for a way on which partners change hands: from `start` to a free partner, or to a port that
  /// may go empty instead since it has fewer messages to go (Berge; the ports with most can all be served, by König's
  /// theorem, where everything is ready).
  void augment(uint32_t start, uint32_t round) {
    struct Step {
      uint32_t port; // on the side of `start`
      uint32_t pair; // by which its predecessor would take this port's partner
      size_t before;
    };
    std::vector<Step> steps = {{start, kNone, 0}};
    ++search_;
    for (size_t at = 0; at < steps.size(); ++at) {
      const Port &mine = ports_[steps[at].port];
      for (uint32_t candidate : mine.pairs) {
        const Pair &pair = pairs_[candidate];
        if (!open(pair, round))
          continue;
        const uint32_t partner = other(mine, pair);
        const uint32_t holding = ports_[partner].mate;
        if (candidate == holding || ports_[partner].search == search_)
          continue;
        ports_[partner].search = search_;
        const uint32_t rival = holding == kNone ? kNone : other(ports_[partner], pairs_[holding]);
        if (rival != kNone && ports_[rival].messages == ports_[start].messages) {
          steps.push_back({rival, candidate, at});
          continue;
        }
        if (rival != kNone)
          ports_[rival].mate = kNone;
        take(candidate);
        for (size_t back = at; back > 0; back = steps[back].before)
          take(steps[back].pair);
        return;
      }
    }
  }

  void take(uint32_t pair) { ports_[pairs_[pair].out].mate = ports_[pairs_[pair].in].mate = pair; }

  template <class Give> void send(Pair &pair, uint32_t round, Give give) {
    if (pair.busy != round)
      pair.given = 0;
    pair.busy = round;
    int64_t room = bytes_;
    for (size_t i = pair.first; i < pair.items.size() && room > 0; ++i) {
      Item &item = pair.items[i];
      if (item.ready == item.sent)
        continue;
      const int64_t bytes = give(static_cast<const Item &>(item), std::min(room, item.ready - item.sent));
      item.sent += bytes;
      room -= bytes;
      pair.given += bytes;
      pair.ready -= bytes;
      change(pair, -bytes);
      if (item.ready > item.sent)
        break; // cut: the rest goes later
    }
    while (pair.first < pair.items.size() && pair.items[pair.first].sent == pair.items[pair.first].bytes)
      ++pair.first;
  }

  const int64_t bytes_;
  const int turns_;
  std::vector<Pair> pairs_;
  std::vector<Port> ports_;
  std::map<std::pair<int32_t, int32_t>, uint32_t> pairOf_;
  std::map<std::pair<int64_t, bool>, uint32_t> portOf_;
  std::vector<uint32_t> order_;
  uint64_t search_ = 0; // searches for another partner so far
  int64_t left_ = 0;
};

/// For every hop, how many hops come after it on the longest way.
std::vector<std::vector<uint32_t>> depths(const std::vector<Stream> &streams) {
  std::vector<std::vector<uint32_t>> result;
  for (const Stream &stream : streams) {
    std::vector<uint32_t> &depth = result.emplace_back(stream.hops.size());
    for (size_t h = stream.hops.size(); h-- > 0;)
      if (const int32_t before = stream.hops[h].after; before >= 0)
        depth[before] = std::max(depth[before], depth[h] + 1);
  }
  return result;
}

} // namespace

std::vector<Grant> dealRounds(const std::vector<Stream> &streams, const ir::Topology &topology,
                              const RoundLimits &limits,
                              const std::function<int64_t(uint32_t stream, int64_t from, int64_t to)> &snap) {
  std::array<Tier, 2> tiers = {Tier(limits.bytes, 1), Tier(limits.localBytes, limits.localTurns)};
  struct Place {
    int tier = 0;
    uint32_t pair = 0;
    size_t item = 0;
  };
  std::vector<std::vector<Place>> placeOf;
  for (const Stream &stream : streams)
    placeOf.emplace_back(stream.hops.size());

  // What has furthest to go stands first in its pair's queue.
  const std::vector<std::vector<uint32_t>> depth = depths(streams);
  std::vector<std::pair<uint32_t, uint32_t>> all;
  for (uint32_t s = 0; s < streams.size(); ++s)
    for (uint32_t h = 0; h < streams[s].hops.size(); ++h)
      if (streams[s].bytes > 0)
        all.emplace_back(s, h);
  std::stable_sort(all.begin(), all.end(),
                   [&](const auto &a, const auto &b) { return depth[a.first][a.second] > depth[b.first][b.second]; });
  for (const auto &[s, h] : all) {
    const Stream::Hop &hop = streams[s].hops[h];
    const bool local = topology.node(hop.from) == topology.node(hop.to);
    Tier &tier = tiers[local];
    Place &place = placeOf[s][h];
    place.tier = local;
    place.pair = local ? tier.pair(hop.from, hop.to, hop.from, hop.to)
                       : tier.pair(hop.from, hop.to, topology.nic(hop.from), topology.nic(hop.to));
    place.item = tier.add(place.pair, s, h, streams[s].bytes);
    if (hop.after < 0)
      tier.makeReady(place.pair, place.item, streams[s].bytes);
  }

  std::vector<Grant> grants;
  std::array<std::vector<size_t>, kTurnaround> arrived; // grants, by round modulo kTurnaround
  for (uint32_t round = 0; !tiers[0].done() || !tiers[1].done(); ++round) {
    std::vector<size_t> &due = arrived[round % kTurnaround];
    for (size_t g : due)
      for (uint32_t h = grants[g].hop + 1; h < streams[grants[g].stream].hops.size(); ++h)
        if (streams[grants[g].stream].hops[h].after == static_cast<int32_t>(grants[g].hop)) {
          const Place &place = placeOf[grants[g].stream][h];
          tiers[place.tier].makeReady(place.pair, place.item, grants[g].end);
        }
    due.clear();
    for (Tier &tier : tiers)
      tier.round(round, [&](const Item &item, int64_t room) {
        const int64_t limit = item.sent + room;
        const int64_t end = limit == item.ready ? limit : snap(item.stream, item.sent, limit);
        if (end == item.sent)
          return int64_t{0};
        due.push_back(grants.size());
        grants.push_back({round, item.stream, item.hop, item.sent, end});
        return end - item.sent;
      });
  }
  return grants;
}

} // namespace reshard
