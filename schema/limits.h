// SPDX-License-Identifier: Apache-2.0
// Limits of a plan, the same for writer, loader and executor.
#pragma once

#include <cstdint>

namespace reshard::schema {

/// Ranks of a plan.
inline constexpr uint32_t kMaxSegments = 1 << 20;
/// Bytes of a segment are fewer than this. FlatBuffers fail above 2 GiB, in release builds without an error.
inline constexpr uint64_t kMaxSegmentBytes = uint64_t{1} << 30;
/// A compressed segment has at least 1 / kMaxCompression of its bytes in the file, so that a small file cannot fill the
/// memory of a reader.
inline constexpr uint64_t kMaxCompression = 64;
/// Loops of one shape. An executor keeps them in an array (kernels::kMaxLoops).
inline constexpr uint32_t kMaxLoops = 16;
/// Chunks of messages are multiples of this many bytes.
inline constexpr uint64_t kChunkAlignment = 256;
/// Engine replicas of a pool, and the world ranks that they may have.
inline constexpr uint32_t kMaxReplicas = 1 << 16;
inline constexpr int64_t kMaxPoolRanks = int64_t{1} << 31;
/// Instances of one param on one mesh rank.
inline constexpr int64_t kMaxInstances = int64_t{1} << 22;
/// Ranges into which loops split the operands of one segment, beyond one for each operand: each change of the buffer
/// begins a new range. An executor needs about 32 bytes for each; the limit keeps a few loops from exhausting memory. A
/// rank of a model with 10^12 parameters has about a thousand ranges.
inline constexpr int64_t kMaxOperandRanges = int64_t{1} << 24;
/// Operands of all steps of one segment, the shared ones counted once for each step. An executor needs about 48 bytes
/// for each, so that a small segment could otherwise exhaust memory.
inline constexpr uint64_t kMaxOperandUses = uint64_t{1} << 24;
/// Chunks of the messages of one segment, each counted once more for every step that its message waits for. An executor
/// keeps a number for each. In chunks of 64 KiB, the limit is 1 TiB.
inline constexpr int64_t kMaxChunks = int64_t{1} << 24;
/// Files of the job that a plan holds, and bytes of these with their paths and of all --set options.
inline constexpr uint32_t kMaxInputFiles = 4096;
inline constexpr uint64_t kMaxInputBytes = uint64_t{16} << 20;
/// Positions, lengths and bytes. Sums of a few of them do not overflow 64 bits.
inline constexpr int64_t kMaxSize = int64_t{1} << 60;

} // namespace reshard::schema
