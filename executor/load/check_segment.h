// SPDX-License-Identifier: Apache-2.0
// Checks what the FlatBuffers verifier cannot: every offset, size, rank and index of a segment, against the manifest.
#pragma once

#include "base/status.h"
#include "executor/load/mesh_rank_index.h"
#include "schema/manifest.h"

namespace reshard {

/// Checks the segment of `rank`: buffers are those of the manifest, every operand is inside its buffers over all its
/// loops, inputs are of source, arena or targets, outputs are of targets or arena, both sides of a copy have equal
/// shapes, rounds ascend. Errors state what was found and expected, and are of kind badPlan. The manifest must have
/// passed checkManifest. Time is linear in the segment.
Status checkSegment(const schema::Manifest &manifest, const MeshRankIndex &meshRanks, const schema::Segment &segment,
                    uint32_t rank);

/// Whether two shapes, of one segment or two, have equal row bytes and equal loop counts, so that one can be copied to
/// the other.
bool shapesMatch(const schema::Segment &a, const schema::Shape &x, const schema::Segment &b, const schema::Shape &y);

/// Bytes at the beginning of a rank's arena in which elements are staged until whole rows of blocks can be quantized,
/// rounded up to kChunkAlignment. The slots of messages follow. The segment's operands must have been checked.
uint64_t arenaHeadBytes(const schema::Segment &segment);

} // namespace reshard
