// What no plan may exceed: writer, loader and executor agree on these numbers.
#pragma once

#include <cstdint>

namespace reshard::schema {

/// Ranks of a plan.
inline constexpr uint32_t kMaxSegments = 1 << 20;
/// A segment stays below: FlatBuffers end at 2 GiB, where release builds would write garbage silently.
inline constexpr uint64_t kMaxSegmentBytes = uint64_t{1} << 30;
/// Loops of one shape, so that an executor can keep them in an array (kernels::kMaxLoops).
inline constexpr uint32_t kMaxLoops = 16;
/// Chunks of messages are multiples of it (bytes).
inline constexpr uint64_t kChunkAlignment = 256;
/// Instances of one param on one place.
inline constexpr int64_t kMaxInstances = int64_t{1} << 22;
/// Pieces that loops make of the operands of one segment, beyond one for each operand: one each time that they change
/// the buffer. So a few loops cannot ask an executor, which takes some 32 bytes for each, for all memory there is. A
/// rank of a model of a trillion parameters has about a thousand.
inline constexpr int64_t kMaxOperandRanges = int64_t{1} << 24;
/// Chunks of the messages of one segment, each counted once more for every step that its message waits for: an executor
/// keeps a number for each of these. In chunks of 64 KiB a terabyte.
inline constexpr int64_t kMaxChunks = int64_t{1} << 24;
/// Positions, lengths and bytes, so that sums of a few of them do not overflow.
inline constexpr int64_t kMaxSize = int64_t{1} << 60;

} // namespace reshard::schema
