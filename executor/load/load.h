// SPDX-License-Identifier: Apache-2.0
// Opens a plan file and checks it, so that later code may trust its numbers: FlatBuffers verifier, digest, then every
// offset, size, rank and index against the manifest's buffers.
#pragma once

#include "base/status.h"
#include "schema/container.h"
#include "schema/manifest.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

/// Maps a world rank to its mesh rank in each endpoint: an index of `Endpoint.ranks` of a manifest that has passed
/// checkManifest. Time and memory are linear in the manifest (times a logarithm for the sort), a lookup is logarithmic:
/// without the index, loading all segments of a plan takes time quadratic in its ranks.
class MeshRankIndex {
public:
  explicit MeshRankIndex(const schema::Manifest &manifest);

  /// The mesh rank of a world rank, or for a storage endpoint of a file number; no value if the endpoint does not have
  /// it.
  std::optional<uint32_t> find(uint32_t endpoint, uint32_t rank) const;

private:
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> meshRanks_; // by endpoint: (rank, mesh rank), sorted
};

/// An opened plan. Thread-safe once open.
class Plan {
public:
  /// Opens the file and checks header and manifest. Errors name the path and are of kind badPlan.
  static Status open(const std::string &path, std::unique_ptr<Plan> &plan);
  const schema::Manifest &manifest() const { return *manifest_; }
  const schema::Container &container() const { return *container_; }
  uint32_t world() const { return container_->segments(); }
  /// The mesh rank of a world rank in each endpoint.
  const MeshRankIndex &meshRanks() const { return *meshRanks_; }
  const std::string &digest() const { return container_->digest(); }
  /// A rank's segment, verified and checked (checkSegment) at every call. The pointer keeps its bytes; so a caller that
  /// reads all segments can have one at a time in memory. Errors name the path and are of kind badPlan, or `invalid` if
  /// the plan has no such rank.
  Status segment(uint32_t rank, std::shared_ptr<const schema::Segment> &segment) const;

private:
  std::string path_;
  std::unique_ptr<schema::Container> container_;
  const schema::Manifest *manifest_ = nullptr;
  std::optional<MeshRankIndex> meshRanks_;
};

/// Checks that each message has one send and one receive, which name each other and have the same round, bytes, chunks
/// and operand shapes. Reads every segment; needs a few bytes of memory for each message.
Status checkMessages(const Plan &plan);
/// The same for segments that were read, by rank, on `threads` threads.
Status checkMessages(const Plan &plan, std::span<const std::shared_ptr<const schema::Segment>> segments,
                     unsigned threads);

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
