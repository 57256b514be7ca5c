// Streams between nodes in part by way of other ranks of the sender's node (spread.h), and where these hold what they
// relay.
#pragma once

#include "compiler/schedule/descriptor_cutter.h"
#include "compiler/schedule/rounds.h"
#include "compiler/schedule/staged_ranges.h"

#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace reshard {

/// Descriptors that go the same way.
struct FlowKey {
  EpochPhase when;
  int32_t source = 0, target = 0; // world ranks
  int32_t route = -1;
  int32_t relay = -1; // a rank of the source's node that sends them on to the target; -1: none
  bool operator==(const FlowKey &) const = default;
  auto fields() const { return std::tie(when, source, target, route, relay); }
  /// Whether its first rank reads from files, which is no message.
  bool reads() const { return source == target; }
};

class Relays {
public:
  Relays(const ir::Layout &layout, Interner<ir::Shape> &shapes, DescriptorCutter &cutter)
      : layout_(layout), shapes_(shapes), cutter_(cutter), held_(layout.world) {}

  /// Descriptors of all streams, cut, with the ways that they are to take; none where all streams stay as they are.
  /// Those of stream s are [firsts[s], firsts[s + 1]). All streams of a generation go in as many phases, one after the
  /// other, as the relays' memory asks for; so nothing is relayed where something is quantised, which has phases of its
  /// own.
  std::vector<std::pair<FlowKey, ir::Descriptor>> cut(const std::vector<FlowKey> &keys,
                                                      const std::vector<Stream> &flows,
                                                      const std::vector<size_t> &firsts,
                                                      const std::vector<ir::Descriptor> &descriptors);
  /// Gives the streams that are relayed their places in the relays' arenas. Phases use the same memory.
  void layOut(const std::vector<FlowKey> &keys, const std::vector<Stream> &flows);

  /// Where a relayed stream stands in the arena of its relay.
  int64_t base(size_t flow) const { return bases_.at(flow); }
  /// Bytes of a rank's arena, from its beginning, for what it relays.
  int64_t held(int32_t rank) const { return held_[static_cast<size_t>(rank)]; }

private:
  using Split = std::vector<std::pair<int32_t, int64_t>>; // relays (-1: none) and bytes
  bool fits(const std::vector<std::pair<FlowKey, ir::Descriptor>> &all, int64_t room) const;
  void cutFlow(const FlowKey &key, llvm::ArrayRef<ir::Descriptor> descriptors, const Split &split, int64_t phases,
               std::vector<std::pair<FlowKey, ir::Descriptor>> &all);

  const ir::Layout &layout_;
  Interner<ir::Shape> &shapes_;
  DescriptorCutter &cutter_;
  std::map<size_t, int64_t> bases_; // by stream
  std::vector<int64_t> held_;       // by rank
};

} // namespace reshard
