// What ranks of a plan do on a device, one thing after the other: copies of all ranks that share it; or packs, groups
// of sends and receives, and unpacks of one rank.
#pragma once

#include "executor/device.h"
#include "executor/transport.h"

namespace reshard {

/// Appends a launch for each wave of the copies of all ranks (executor/dependency_levels.h); adds the bytes that they
/// bring to `bytes`. An error text, empty on success.
std::string addDependencyLevels(const Plan &plan, const std::vector<LocalRank> &ranks,
                                std::vector<Operation> &operations, uint64_t &bytes);

/// Where a rank stages: the plan's arena, and what messages to itself need.
struct Staging {
  std::byte *arena = nullptr;
  std::byte *self = nullptr; // of 4 * selfBytes: two slots each way; null: local copies are copies
  uint64_t selfBytes = 0;
  std::byte *splitUnits = nullptr; // of partedUnits * Parted::kUnit
  uint64_t splitUnitCount = 0;
};

/// Units that chunks of a rank's messages part, at most: 0 where nothing changes on its way. `selfBytes` as in Staging.
uint64_t splitUnitCount(const LocalRank &rank, uint64_t selfBytes);

/// Bytes of a chunk of what a rank sends to itself: at most `most`, and not more than it copies. 0 where it copies
/// nothing.
uint64_t selfChunk(const LocalRank &rank, uint64_t most);

/// Appends the operations of a rank; adds the bytes that they bring to its targets to `bytes`. An error text, empty on
/// success.
///
/// Chunk c of a message of round r goes at time r + c. The chunks of a time are a phase: they are packed, go in one
/// group, and are unpacked. The launch beside a phase's group unpacks the phase before and packs the one after. Where
/// they pass on or share bytes, they are launched between the groups instead. What the rank copies, fills and reduces
/// itself comes when all that it waits for is unpacked; or, where it shall send it to itself, in phases of its own, the
/// first. Ahead of all and behind all comes the work of the rank's faces.
///
/// Why this ends: both ends of a chunk are in the groups of one time, and groups are in the order of times on every
/// rank, so the earliest time that is left has both ends of each of its chunks. Why it is right: what a chunk needs, by
/// `after`, is done at an earlier time. This is checked: a slot's earlier chunks, a relay's received ones
/// (executor/chunks.h). Where it does not hold there is an error, on this rank.
std::string addRounds(const LocalRank &rank, const Staging &staging, std::vector<Operation> &operations,
                      uint64_t &bytes);

} // namespace reshard
