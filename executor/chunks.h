// Messages that go in several chunks.
#pragma once

#include "schema/plan_generated.h"

#include <cstdint>
#include <vector>

namespace reshard {

/// Of a send or a receive.
inline uint64_t chunkCount(const schema::Step &step) {
  return step.chunk() > 0 ? (step.bytes() + step.chunk() - 1) / step.chunk() : 1;
}
/// Bytes of chunk `number`.
inline uint64_t chunkBytes(const schema::Step &step, uint64_t number) {
  return step.chunk() == 0               ? step.bytes()
         : number + 1 < chunkCount(step) ? step.chunk()
                                         : step.bytes() - number * step.chunk();
}

/// For each chunk of a send, how many chunks of a receive of the same rank, which it waits for, must be there before
/// it: those with the bytes that it passes on. So a message follows another one chunk by chunk. What both have they
/// name by equal operands; a send that shares none with the receive waits for all of it. O(operands of both + chunks of
/// the send).
std::vector<uint64_t> chunksBefore(const schema::Segment &segment, const schema::Step &send,
                                   const schema::Step &receive);

} // namespace reshard
