#include "compiler/relays.h"

#include "compiler/descriptor_cuts.h"
#include "compiler/spread.h"

#include <algorithm>

namespace reshard {

using namespace ir;

std::vector<std::pair<Way, Descriptor>> Relays::cut(const std::vector<Way> &ways, const std::vector<Stream> &streams,
                                                    const std::vector<size_t> &firsts,
                                                    const std::vector<Descriptor> &descriptors) {
  for (const Endpoint &endpoint : layout_.endpoints)
    for (const Param &param : endpoint.params)
      if (param.face)
        return {};
  int64_t sent = 0;
  for (const Stream &stream : streams)
    sent += stream.bytes * static_cast<int64_t>(stream.hops.size());
  const int64_t room = relayRoom(layout_, sent);
  std::vector<Parts> parts(streams.size());
  std::vector<int64_t> phases(streams.size(), 1);
  bool any = false;
  for (size_t first = 0, last = 0; first < streams.size(); first = last) { // generation after generation
    std::vector<Sending> sendings;
    std::vector<size_t> of; // sendings, their streams
    for (; last < streams.size() && ways[last].stage == ways[first].stage; ++last) {
      parts[last] = {{-1, streams[last].bytes}};
      for (size_t h = 0; h < streams[last].hops.size(); ++h)
        if (const Stream::Hop &hop = streams[last].hops[h];
            layout_.topology.node(hop.from) != layout_.topology.node(hop.to)) {
          sendings.push_back({hop.from, hop.to, streams[last].bytes, h == 0 && !ways[last].reads()});
          of.push_back(last);
        }
    }
    const std::vector<Relayed> relayed = spread(sendings, layout_.topology, layout_.world, room * kMostRelayPhases);
    for (const Relayed &each : relayed) {
      parts[of[each.sending]].emplace_back(each.relay, each.bytes);
      parts[of[each.sending]].front().second -= each.bytes;
    }
    std::fill(phases.begin() + static_cast<ptrdiff_t>(first), phases.begin() + static_cast<ptrdiff_t>(last),
              relayPhases(relayed, layout_.world, room - room / 8));
    any = any || !relayed.empty();
  }
  // Cuts and alignment may make more of a phase than its share.
  std::vector<std::pair<Way, Descriptor>> all;
  for (int64_t more = 1; any && more <= kMostRelayPhases; more *= 2) {
    all.clear();
    for (size_t s = 0; s < streams.size(); ++s)
      part(ways[s], llvm::ArrayRef(descriptors).slice(firsts[s], firsts[s + 1] - firsts[s]), parts[s], phases[s] * more,
           all);
    if (layout_.stagingLimit == 0 || fits(all, room))
      return all;
  }
  return {};
}

/// Whether no relay holds more than its room in any phase. Descriptors of one way follow one another.
bool Relays::fits(const std::vector<std::pair<Way, Descriptor>> &all, int64_t room) const {
  std::map<std::pair<Stage, int32_t>, int64_t> held;
  for (size_t first = 0, last = 0; first < all.size(); first = last) {
    int64_t bytes = 0;
    for (; last < all.size() && all[last].first == all[first].first; ++last)
      bytes += bytesOf(shapes_[all[last].second.shape]);
    if (const Way &way = all[first].first; way.relay >= 0 && (held[{way.stage, way.relay}] += staged(bytes)) > room)
      return false;
  }
  return true;
}

/// Each part goes in all phases alike. Cuts are where streams are well cut.
void Relays::part(const Way &way, llvm::ArrayRef<Descriptor> descriptors, const Parts &parts, int64_t phases,
                  std::vector<std::pair<Way, Descriptor>> &all) {
  DescriptorCuts cuts;
  int64_t bytes = 0;
  for (const Descriptor &d : descriptors) {
    cuts.add(bytesOf(shapes_[d.shape]), shapes_[d.shape].rowBytes, 0);
    bytes += bytesOf(shapes_[d.shape]);
  }
  cuts.endStream();
  std::vector<Descriptor> stack(descriptors.rbegin(), descriptors.rend()), taken;
  int64_t at = 0, begin = 0;
  for (const auto &[relay, some] : parts) {
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t wanted = begin + static_cast<int64_t>(static_cast<__int128>(some) * (phase + 1) / phases);
      const int64_t end = wanted == bytes ? bytes : wanted > at ? cuts.best(0, at, wanted) : at;
      taken.clear();
      cutter_.take(stack, end - at, taken);
      Way next = way;
      next.relay = relay;
      next.stage.second += static_cast<uint32_t>(phase);
      for (const Descriptor &d : taken)
        all.emplace_back(next, d);
      at = end;
    }
    begin += some;
  }
}

void Relays::place(const std::vector<Way> &ways, const std::vector<Stream> &streams) {
  std::map<std::pair<Stage, int32_t>, int64_t> held; // in a stage, by relay
  for (size_t s = 0; s < streams.size(); ++s)
    if (const int32_t relay = ways[s].relay; relay >= 0) {
      int64_t &bytes = held[{ways[s].stage, relay}];
      bases_[s] = bytes;
      bytes += staged(streams[s].bytes);
      held_[static_cast<size_t>(relay)] = std::max(held_[static_cast<size_t>(relay)], bytes);
    }
}

} // namespace reshard
