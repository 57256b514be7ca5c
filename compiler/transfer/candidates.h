// Who may give a tile to a target, by the locality rule: the target's own rank where it holds it, else ranks of its
// node, else all holders.
#pragma once

#include "ir/ir.h"

#include <optional>
#include <vector>

namespace reshard {

/// The places that hold a tile and may be read, for one target after another. Ranks, and the locality rule, mean
/// something where neither side is storage.
class Candidates {
public:
  explicit Candidates(const ir::Layout &layout);

  /// Looks at this tile from now on.
  void select(const ir::Overlap &overlap);

  /// The source place on the target's own rank that holds the tile; padding: -1.
  std::optional<int32_t> own(int32_t target) const;
  /// Whether bytes to this target come from another rank: neither side is storage, and it does not hold the tile
  /// itself.
  bool remote(int32_t target) const;
  /// All holders, ascending.
  const std::vector<int32_t> &all() const { return replicas_; }
  /// The holders on a node; none where there is no topology or the source is storage.
  const std::vector<int32_t> &onNode(int64_t node) const;
  /// The holders on the target's node where there are some, else all.
  const std::vector<int32_t> &preferred(int32_t target) const;
  /// The node of a target place; -1 for a storage endpoint's file.
  int64_t nodeOf(int32_t target) const;

  /// The holder (by number) that has a place.
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
  std::vector<Node> nodes_; // the first used_ of them, ascending; the others keep their memory for the next tile
  size_t used_ = 0;
};

} // namespace reshard
