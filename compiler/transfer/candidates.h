// SPDX-License-Identifier: Apache-2.0
// The candidate sources of an overlap for a target, by the locality rule: the target's own rank if it holds the
// elements; else the replicas on its node; else all replicas.
#pragma once

#include "ir/ir.h"

#include <optional>
#include <vector>

namespace reshard {

/// The mesh ranks that hold an overlap and may be read. "Target" is a mesh rank of the overlap's target endpoint. The
/// locality rule applies only if neither side is storage.
class Candidates {
public:
  explicit Candidates(const ir::Layout &layout);

  /// Sets the overlap that the other functions refer to. It must outlive their calls.
  void select(const ir::Overlap &overlap);

  /// The source mesh rank on the target's own world rank, if it holds the overlap; -1 for padding.
  std::optional<int32_t> own(int32_t target) const;
  /// Whether this target receives the bytes from another rank: neither side is storage, and its own rank does not hold
  /// the overlap.
  bool remote(int32_t target) const;
  /// All replicas, ascending.
  const std::vector<int32_t> &all() const { return replicas_; }
  /// The replicas on a node, ascending; empty if the job has no topology or if the source is storage.
  const std::vector<int32_t> &onNode(int64_t node) const;
  /// The replicas on the target's node if there are any, else all.
  const std::vector<int32_t> &preferred(int32_t target) const;
  /// The node of a target; -1 for a file.
  int64_t nodeOf(int32_t target) const;

  /// The number of the replica group that contains a mesh rank.
  static uint32_t replicaGroupOf(const ir::Overlap &overlap, int32_t meshRank);

private:
  struct Node;
  int32_t rankOf(int32_t target) const;
  Node &node(int64_t number);

  const ir::Layout &layout_;
  const ir::Endpoint &source_;
  std::vector<int32_t> meshRankOfRank_;
  const ir::Overlap *overlap_ = nullptr;
  std::vector<int32_t> replicas_;
  struct Node {
    int64_t number = 0;
    std::vector<int32_t> replicas;
  };
  std::vector<Node> nodes_; // the first used_ are valid, ascending; the others keep their memory for the next overlap
  size_t used_ = 0;
};

} // namespace reshard
