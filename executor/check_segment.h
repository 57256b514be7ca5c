// What a verified FlatBuffer may still get wrong: every offset, size, rank and index of a segment, against the
// manifest.
#pragma once

#include "executor/mesh_rank_index.h"
#include "schema/manifest.h"

#include <string>

namespace reshard {

/// Empty where the segment of `rank` means something: buffers as the manifest says, every operand inside its buffers
/// over all its loops, inputs from source, arena or targets, outputs to targets or arena, both sides of a copy alike,
/// rounds in order. Otherwise what was found and expected. The manifest must have passed checkManifest. Linear in the
/// segment.
std::string checkSegment(const schema::Manifest &manifest, const MeshRankIndex &meshRanks,
                         const schema::Segment &segment, uint32_t rank);

/// Whether two shapes of the same or of different segments can be walked together: equal rows, equal loop counts.
bool shapesMatch(const schema::Segment &a, const schema::Shape &x, const schema::Segment &b, const schema::Shape &y);

/// Bytes of a rank's arena, from its beginning, where steps gather what is quantised in rows of blocks; slots of
/// messages lie behind. Of a segment whose operands have been checked.
uint64_t arenaHeadBytes(const schema::Segment &segment);

} // namespace reshard
