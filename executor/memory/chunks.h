// SPDX-License-Identifier: Apache-2.0
// The chunks of a message.
#pragma once

#include "schema/plan_generated.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// The number of chunks of a send or a receive.
inline uint64_t chunkCount(const schema::Step &step) {
  return step.chunk() > 0 ? (step.bytes() + step.chunk() - 1) / step.chunk() : 1;
}
/// Bytes of chunk `number`.
inline uint64_t chunkBytes(const schema::Step &step, uint64_t number) {
  return step.chunk() == 0               ? step.bytes()
         : number + 1 < chunkCount(step) ? step.chunk()
                                         : step.bytes() - number * step.chunk();
}
/// Where chunk `number` of a staged message begins in the arena.
inline uint64_t chunkStaging(const schema::Step &step, uint64_t number) {
  return step.staging() + (step.slot() + number) % 2 * step.chunk();
}

/// result[i][c]: how many chunks of the i-th step in the send's `after` must be done before chunk c of the send, so
/// that a rank forwards a message chunk by chunk.
/// - A receive: up to the last chunk with bytes that chunk c forwards. Both steps name these bytes by equal operands.
/// - A copy or fill: 1, which is all of it.
/// - An earlier send: 0, since its slots become free chunk by chunk.
/// A chunk that reads a target by an operand that no receive in `after` has waits for all chunks of all these receives.
/// Time: O(operands of all these steps + chunks of the send).
std::vector<std::vector<uint64_t>> chunksBefore(const schema::Segment &segment, const schema::Step &send);

} // namespace reshard
