#include "compiler/rounds.h"

#include "compiler/staging.h"
#include "compiler/tier.h"

#include <algorithm>
#include <tuple>

namespace reshard {

namespace {

/// What leaves a node's entry for several ranks beside it, and goes no further, waits until there is an eighth of it:
/// else the entry would change from one to the next with every chunk, and only the last part's delay counts.
constexpr int64_t kBatches = 8;

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
