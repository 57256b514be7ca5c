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

/// For each step that a send's `after` names, and each chunk of the send, how many chunks of that step must be done
/// before it: so a message follows another one chunk by chunk. Of a receive, those with the bytes that the chunk passes
/// on, which both name by equal operands; of a copy or fill all, which is one; of an earlier send none, since the slots
/// that it had change hands chunk by chunk. A chunk that reads a target by an operand that none of the steps has waits
/// for all of them. O(operands of all of them + chunks of the send).
std::vector<std::vector<uint64_t>> chunksBefore(const schema::Segment &segment, const schema::Step &send);

} // namespace reshard
