// SPDX-License-Identifier: Apache-2.0
// How many bytes of a rank's arena are in use over the time of a simulation.
#pragma once

#include "report/simulate/simulate.h"

#include <unordered_map>
#include <vector>

namespace reshard::report {

/// The activities of one message, by chunk.
struct MessageTimes {
  std::vector<const Activity *> pack, transmit, unpack;
};

/// The activities of one rank.
struct RankTimes {
  std::unordered_map<uint32_t, MessageTimes> messages; // sent or received ones
  std::vector<const Activity *> copies;                // its other steps, in their order
};

/// Bytes in use from a time on.
struct ArenaPoint {
  double seconds;
  uint64_t bytes;
};

/// The bytes of a rank's arena that are in use, from time 0 to `end`, where the last entry is. In use are
/// - a chunk of a staged message: of a send, from the begin of its packing until its bytes are sent; of a receive, from
///   the begin of its transmission until it is unpacked;
/// - relayed bytes and elements that are staged for quantization: from the begin of the message or copy that brings
///   them until the last step that reads them has done so;
/// - the memory of quantized views and of transformed params: always.
std::vector<ArenaPoint> arenaOverTime(const schema::Manifest &manifest, const schema::Segment &segment,
                                      const RankTimes &times, double end);

} // namespace reshard::report
