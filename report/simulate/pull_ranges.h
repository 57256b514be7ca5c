// SPDX-License-Identifier: Apache-2.0
// The ranges of bytes that the ranks of an engine replica read, and which ranges must have arrived before.
#pragma once

#include "executor/load/load.h"

#include <array>
#include <cstdint>
#include <vector>

namespace reshard::report {

/// The two sequences in which a rank reads: messages of the source, and messages that ranks of its replica forward.
enum Lane : uint8_t { kParent, kOwn };

/// How many ranges at the beginning of each lane.
struct RangeProgress {
  std::array<uint32_t, 2> count = {};
  bool within(const RangeProgress &other) const {
    return count[kParent] <= other.count[kParent] && count[kOwn] <= other.count[kOwn];
  }
  void include(const RangeProgress &other);
};

/// At most 4 MiB of a message.
struct PullRange {
  uint32_t sender = 0; // the rank of the plan that sends the message
  uint32_t bytes = 0;
  uint64_t unpacked = 0; // bytes that the reader unpacks, or copies, when the range has arrived
  bool packed = false;   // the server packs the range
  bool bySource = false; // engine replicas do not serve it: their memory has it in another form
  RangeProgress served;  // by the sender, before it can serve the range; lane kOwn only
  RangeProgress wanted;  // by the reader, before it reads the range
};

/// The ranges of one rank of the target.
struct RankRanges {
  std::array<std::vector<PullRange>, 2> lanes;
  uint64_t copiedFirst = 0; // bytes that it copies or fills before anything arrives
  RangeProgress all() const {
    return {{static_cast<uint32_t>(lanes[kParent].size()), static_cast<uint32_t>(lanes[kOwn].size())}};
  }
};

/// The ranges of all ranks of a pool.
class PullRanges {
public:
  static constexpr uint64_t kBytes = 4 << 20;

  /// The plan's target must be a pool.
  static Result<PullRanges> of(const Plan &plan);

  uint32_t firstRank() const { return first_; } // in replica 0
  uint32_t meshRanks() const { return static_cast<uint32_t>(ranks_.size()); }
  const RankRanges &of(uint64_t meshRank) const { return ranks_[meshRank]; }

private:
  uint32_t first_ = 0;
  std::vector<RankRanges> ranks_;
};

} // namespace reshard::report
