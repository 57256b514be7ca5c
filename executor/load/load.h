// SPDX-License-Identifier: Apache-2.0
// Opens a plan file and checks it, so that later code may trust its numbers: FlatBuffers verifier, digest, then every
// offset, size, rank and index against the manifest's buffers.
#pragma once

#include "base/status.h"
#include "executor/load/mesh_rank_index.h"
#include "schema/container.h"
#include "schema/manifest.h"

#include <memory>
#include <span>
#include <string>

namespace reshard {

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

} // namespace reshard
