// SPDX-License-Identifier: Apache-2.0
// The operations of a plan's ranks on a device, in order: the copies of all ranks, if they share one device; or one
// rank's packs, batches of sends and receives, and unpacks.
#pragma once

#include "executor/interfaces/device.h"
#include "executor/transports/transport.h"

namespace reshard {

/// Appends a launch for each dependency level of the copies of all ranks (executor/transports/dependency_levels.h), and
/// adds the bytes that they move to `bytes`.
Status addDependencyLevels(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<Operation> &operations,
                           uint64_t &bytes);

/// The device memory in which a rank stages: the plan's arena, and slots of messages to itself.
struct Staging {
  std::byte *arena = nullptr;
  std::byte *self = nullptr; // 4 * selfBytes: two slots in each direction; null: local copies are not messages
  uint64_t selfBytes = 0;
  std::byte *splitBlocks = nullptr; // splitBlockCount * SplitBlocks::kBytes bytes
  uint64_t splitBlockCount = 0;
};

/// An upper bound of the elements and blocks that chunk boundaries of a rank's messages split: 0 if the rank
/// converts nothing. `selfBytes` as in Staging.
uint64_t splitBlockCount(const LocalRank &rank, uint64_t selfBytes);

/// Bytes of a chunk of a rank's messages to itself: at most `most` and at most the bytes that it copies, rounded up to
/// 256; 0 if it copies nothing.
uint64_t selfChunk(const LocalRank &rank, uint64_t most);

/// Appends the operations of a rank, and adds the bytes that they move to its targets to `bytes`.
///
/// Chunk c of a message of round r is sent in round r + c. The chunks of a round are packed, sent and received in one
/// batch, and unpacked. Beside a batch runs a launch that unpacks the round before and packs the round after; if these
/// forward or share bytes, they run between the batches instead. Local copies, fills and reduces run when all that they
/// wait for is unpacked; with `self` memory, local copies that wait for nothing are messages to itself, in rounds of
/// their own before all others. The jobs of quantized views run first and last (ViewJobs).
///
/// No deadlock: the send and the receive of a chunk are in batches of the same round, and each rank's batches are in
/// the order of rounds, so the earliest unfinished round has both sides of each of its chunks. Correct order: all that
/// a chunk needs, by `after`, is done in an earlier round. This is checked for the earlier chunks of a slot and for
/// received chunks of a relay (executor/memory/chunks.h); a violation is an error on this rank.
Status addRounds(const LocalRank &rank, const Staging &staging, std::vector<Operation> &operations, uint64_t &bytes);

} // namespace reshard
