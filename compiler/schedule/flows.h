// SPDX-License-Identifier: Apache-2.0
// The first phase of the pass schedule: descriptors become flows, from rank to rank, and descriptors that one rank
// executes alone. The second phase (message_plan.h) assigns flows to messages and rounds, the third (rank_steps.h)
// makes the steps of each rank.
#pragma once

#include "compiler/resolve/interner.h"
#include "compiler/schedule/flow_descriptors.h"
#include "compiler/schedule/rounds.h"
#include "compiler/schedule/staged_ranges.h"
#include "ir/copies.h"
#include "ir/ir.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/STLFunctionalExtras.h"
#include "llvm/Support/Error.h"

#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace reshard {

/// The range that has a buffer, among the ranges of a rank.
const ir::BufferRange &bufferRange(const std::vector<ir::BufferRange> &ranges, uint32_t buffer);

/// The buffers of each world rank, found by mesh rank and by number.
class RankBuffers {
public:
  explicit RankBuffers(const ir::Layout &layout);

  const std::vector<ir::BufferRange> &of(int32_t rank) const { return ranges_[static_cast<size_t>(rank)]; }
  /// The number, on a rank, of the first buffer of a mesh rank.
  uint32_t first(int32_t rank, unsigned endpoint, int32_t meshRank) const {
    return firsts_[static_cast<size_t>(rank)].at({endpoint, meshRank});
  }
  /// The range of the buffer that a descriptor writes, on the rank that has it.
  const ir::BufferRange &targetOf(int32_t rank, const ir::Descriptor &d) const {
    return bufferRange(of(rank), first(rank, d.endpoint, d.target) + d.targetInstance);
  }

private:
  std::vector<std::vector<ir::BufferRange>> ranges_;                     // by rank
  std::vector<std::map<std::pair<unsigned, int32_t>, uint32_t>> firsts_; // by rank: (endpoint, mesh rank) -> buffer
};

/// "First" ranks are the ranks of the first copy of the source, and of all copies of the target that it serves. The
/// ranks of another copy of the source, and of the targets that this serves, repeat their steps.
class RankCopies {
public:
  explicit RankCopies(const ir::Layout &layout);

  const ir::Copies &copies() const { return copies_; }
  /// The mesh rank of the target on a rank; -1 if it has none, or if no copies are folded.
  int32_t targetOn(int32_t rank) const { return targetOn_.empty() ? -1 : targetOn_[static_cast<size_t>(rank)]; }
  /// The rank of a copy of the target that has the part of a rank of its first copy.
  int32_t target(int32_t rank, int64_t copy) const;
  /// The rank of the first copy of the target that has the part of a rank of the target; other ranks: the same.
  int32_t inFirstTarget(int32_t rank) const;

  struct First {
    int32_t rank;
    int64_t copy; // a copy of the source
  };
  /// The rank whose steps a rank repeats, and the copy in which it does.
  First first(int32_t rank) const;
  /// The rank that repeats the steps of a first rank in a copy of the source.
  int32_t repeating(int32_t first, int64_t copy) const;

private:
  const ir::Layout &layout_;
  const ir::Copies copies_;
  std::vector<int32_t> sourceOn_, targetOn_; // by rank: its mesh rank or -1; empty if no copies are folded
};

/// The properties that all descriptors of a flow share.
struct FlowKey {
  EpochPhase when;
  int32_t source = 0, target = 0; // world ranks
  int32_t route = -1;             // the number of its world ranks (RouteNumbers); -1: none
  int32_t relay = -1;             // the rank of the source's node that forwards the flow to the target; -1: none
  bool operator==(const FlowKey &) const = default;
  auto fields() const { return std::tie(when, source, target, route, relay); }
  /// Whether the first rank reads the flow from files, without a message.
  bool reads() const { return source == target; }
};

/// Balances the NICs of a node (relays.cpp). If some NICs of a node have more to send to other nodes than others have,
/// part of these bytes is sent over relays: ranks of the same node with less loaded NICs. A relay holds the bytes in
/// its arena until it has sent them.
class Relays {
public:
  Relays(const ir::Layout &layout, Interner<ir::Shape> &shapes, DescriptorCutter &cutter)
      : layout_(layout), shapes_(shapes), cutter_(cutter), held_(layout.world) {}

  /// Returns the descriptors of all flows, cut where parts of a flow take different relays, each with its new key;
  /// empty if no flow is relayed. The descriptors of flow s are [firsts[s], firsts[s + 1]). The flows of an epoch are
  /// divided into as many phases as the memory of the relays requires. Jobs with quantized views have phases of their
  /// own: in these nothing is relayed.
  std::vector<std::pair<FlowKey, ir::Descriptor>> cut(const std::vector<FlowKey> &keys, const std::vector<Flow> &flows,
                                                      const std::vector<size_t> &firsts,
                                                      const std::vector<ir::Descriptor> &descriptors);
  /// Assigns offsets in the relays' arenas to the relayed flows. All phases use the same memory.
  void layOut(const std::vector<FlowKey> &keys, const std::vector<Flow> &flows);

  /// The offset of a relayed flow in the arena of its relay.
  int64_t base(size_t flow) const { return bases_.at(flow); }
  /// The bytes at the beginning of a rank's arena that hold relayed flows.
  int64_t held(int32_t rank) const { return held_[static_cast<size_t>(rank)]; }

private:
  using Split = std::vector<std::pair<int32_t, int64_t>>; // (relay or -1, bytes)
  bool fits(const std::vector<std::pair<FlowKey, ir::Descriptor>> &all, int64_t room) const;
  void cutFlow(const FlowKey &key, llvm::ArrayRef<ir::Descriptor> descriptors, const Split &split, int64_t phases,
               std::vector<std::pair<FlowKey, ir::Descriptor>> &all);

  const ir::Layout &layout_;
  Interner<ir::Shape> &shapes_;
  DescriptorCutter &cutter_;
  std::map<size_t, int64_t> bases_; // by flow
  std::vector<int64_t> held_;       // by rank
};

/// Names the flow of each descriptor.
class FlowKeys {
public:
  FlowKeys(const ir::Module &module, const StagedRanges &staged, const RankBuffers &buffers);

  /// The flow of a descriptor, from the rank that reads to the rank that writes. Files and zeros are read or written by
  /// the rank of the other side, unless one rank must write the instance (StagedRanges::writer). Copies from files to
  /// files have no flow: their target is -1.
  FlowKey operator()(const ir::Descriptor &d) const;
  /// The world rank of a mesh rank; -1 for a file.
  int32_t rankOf(unsigned endpoint, int32_t meshRank) const {
    return layout_.endpoints[endpoint].storage ? -1 : layout_.endpoints[endpoint].ranks[meshRank];
  }
  /// Whether params of a target have quantized views. Those of the source are only read.
  bool hasViews(unsigned endpoint) const { return hasViews_[endpoint]; }
  /// The bytes of a quantization block if the descriptor's elements are quantized on arrival, else 0.
  int64_t blockBytes(const ir::Descriptor &d) const;

private:
  const ir::Layout &layout_;
  const StagedRanges &staged_;
  const RankBuffers &buffers_;
  const RouteNumbers routes_;
  std::vector<bool> hasViews_; // by endpoint
};

/// A descriptor that one rank executes alone.
struct LocalDescriptor {
  ir::Descriptor descriptor;
  int32_t rank;
};

/// Cuts descriptors so that each of `world` ranks gets consecutive ones with about the same bytes, and appends them to
/// `local`. Cuts are between rows, or, in rows that are longer than 1 MiB, at multiples of `granule(descriptor)` bytes.
void divideFiles(const std::vector<ir::Descriptor> &descriptors, int64_t world, Interner<ir::Shape> &shapes,
                 llvm::function_ref<int64_t(const ir::Descriptor &)> granule, std::vector<LocalDescriptor> &local);

/// The result of the first phase. It refers to the module.
struct Flows {
  explicit Flows(const ir::Module &module);
  Flows(const Flows &) = delete;

  /// The descriptors that a rank executes alone.
  llvm::ArrayRef<LocalDescriptor> localOf(int32_t rank) const;
  /// Whether no step of a rank depends on steps of other ranks, and no limit of the staging can be exceeded: each rank
  /// can then be made on its own, and all steps have dependency level 0.
  bool independentRanks() const;

  const ir::Layout &layout;
  const RankCopies copies;
  const RankBuffers buffers;
  StagedRanges staged;
  Interner<ir::Shape> shapes;
  DescriptorCutter cutter;
  Relays relays;
  const FlowKeys keyOf;
  FlowDescriptors descriptors;
  std::vector<LocalDescriptor> local; // ordered by rank
  std::vector<FlowKey> keys;          // by flow
  std::vector<Flow> flows;            // ordered by key
};

/// Makes the flows of a module's descriptors. If the target has copies that the first copy of the source serves, the
/// flows are those to the first one; the local descriptors are those of all. Returns a StagingLimitError if a row of
/// blocks does not fit the staging limit.
llvm::Expected<std::unique_ptr<Flows>> makeFlows(const ir::Module &module);

} // namespace reshard
