// From a plan file to a segment that can be trusted: FlatBuffers verifier, digest, then every offset, size, rank and
// index against the manifest's buffers.
#pragma once

#include "executor/mesh_rank_index.h"
#include "schema/container.h"
#include "schema/manifest.h"

#include <memory>
#include <string>

namespace reshard {

/// An opened plan. Thread-safe once open.
class Plan {
public:
  /// Maps and checks header and manifest. Returns an error text with the path in it; empty on success.
  static std::string open(const std::string &path, std::unique_ptr<Plan> &plan);
  const schema::Manifest &manifest() const { return *manifest_; }
  const schema::Container &container() const { return *container_; }
  uint32_t world() const { return container_->segments(); }
  /// Where world ranks are in each endpoint.
  const MeshRankIndex &meshRanks() const { return *meshRanks_; }
  const std::string &digest() const { return container_->digest(); }
  /// A rank's segment, verified and checked for meaning (bounds of every operand over all its loops, kinds, peers,
  /// rounds, equal sizes of the two sides of a copy, arena, order), anew at every call. Empty on success, else a text
  /// with the path in it.
  std::string segment(uint32_t rank, const schema::Segment *&segment) const;

private:
  std::string path_;
  std::unique_ptr<schema::Container> container_;
  const schema::Manifest *manifest_ = nullptr;
  std::optional<MeshRankIndex> meshRanks_;
};

/// What no rank can see alone: each message has one send and one receive, which name each other, with the same round,
/// bytes and operands (row bytes and loop counts of the k-th alike). Reads every segment; needs a few bytes of memory
/// for each message. Empty where all is well.
std::string checkMessages(const Plan &plan);

} // namespace reshard
