#include "compiler/tier.h"

#include <algorithm>

namespace reshard {

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

size_t Tier::add(uint32_t pair, uint32_t stream, uint32_t hop, bool goesOn, int64_t bytes) {
  Pair &p = pairs_[pair];
  p.items.push_back({stream, hop, goesOn, bytes, 0, 0, {}});
  change(p, bytes);
  return p.items.size() - 1;
}

void Tier::makeReady(uint32_t pair, size_t item, int64_t upTo, int64_t least, uint32_t brought) {
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

void Tier::begin(uint32_t round, std::vector<Arrival> &arrivals) {
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
  const Item &item = pair.items[pair.current];
  if (pair.message == kNone || item.goesOn)
    return;
  pair.planned = active.coming =
      std::max<int64_t>(0, item.readyFor(messages_[pair.message].round) - item.sent) / bytes_;
}

void Tier::sync(uint32_t number) {
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
  if (pair.given < bytes_) // the last chunk
    pair.message = kNone;
  while (pair.first < pair.items.size() && pair.items[pair.first].sent == pair.items[pair.first].bytes)
    ++pair.first;
  plan(active);
}

bool Tier::add(Pair &pair, uint32_t round, std::vector<Arrival> &arrivals) {
  Message &message = messages_[pair.message];
  pair.given = 0;
  // What is under way goes on, since the end of a chunk may part an element; then the others in order.
  for (size_t next = pair.current, i = pair.first; next < pair.items.size() && pair.given < bytes_; next = i++) {
    Item &item = pair.items[next];
    const int64_t bytes = std::min(bytes_ - pair.given, item.readyFor(message.round) - item.sent);
    if (bytes <= 0)
      continue;
    pair.current = next;
    if (message.grants.empty() || message.grants.back().stream != item.stream || message.grants.back().hop != item.hop)
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

} // namespace reshard
