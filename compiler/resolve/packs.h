// SPDX-License-Identifier: Apache-2.0
// Packs: several tensors joined in one array, the joined array. A tree of packs and their shapes gives the position of
// each tensor's rows in the joined array, and how that is sharded. Dimensions are independent of each other. Rules:
// docs/yaml.md, section 6.
#pragma once

#include "compiler/frontend/frontend.h"
#include "compiler/resolve/schemes.h"
#include "compiler/resolve/tensors.h"

#include <optional>
#include <string>
#include <vector>

namespace reshard {

/// A Pack with its tensors found and its shapes joined.
struct PackTree {
  Pack::Kind kind = Pack::Kind::tensor;
  Location at;
  std::vector<int64_t> shape;
  // tensor
  unsigned tensor = 0;          // into Tensors
  std::vector<int64_t> permute; // dimension i is the tensor's dimension permute[i]; the identity if not stated
  // concat, interleave, flat
  int64_t dimension = 0;
  int64_t groups = 1;          // interleave
  std::vector<int64_t> starts; // flat: of each entry
  std::vector<PackTree> of;
  /// Rows in one group of an interleave.
  int64_t groupRows() const { return shape[dimension] / groups; }
};

/// Finds the tensors of a pack and joins their shapes. Entries of a concat add up along its dimension and agree
/// along the others; each entry of an interleave has rows/groups rows in every group; entries of a flat buffer
/// follow one another. Returns nothing after errors, which are reported at the entry.
std::optional<PackTree> readPack(const Pack &pack, const Tensors &tensors, const Environment &names,
                                 Diagnostics &diagnostics);

/// The tensors of a pack, in order.
std::vector<const PackTree *> leaves(const PackTree &tree);

/// For each leaf, along dimension d: position in the tensor -> position in the joined array.
std::vector<ir::IndexMap> joinedIndexMaps(const PackTree &tree, int64_t d);

/// Whether sharding dimension d shards the entries of a concat along d separately. Then neither `pad` nor lists of
/// sizes are possible.
bool splitsEntries(const PackTree &tree, int64_t d);

/// How shardDimension() shards dimension d, padded to `padded` rows.
struct DimensionSharding {
  int64_t d = 0, padded = 0;
  const Scheme &scheme;
  int64_t ranks = 1;
  bool joined = false; // `cut: joined`: any pack is sharded as one array
};

/// Shards a dimension: position in the joined array -> local position. The entries of a concat along d are sharded
/// separately, and a rank joins its shards of them. An interleave along d is sharded as one array, between groups
/// unless the scheme states a unit. Along other dimensions all entries must have the same sharding.
llvm::Expected<DimensionShards> shardDimension(const PackTree &tree, const DimensionSharding &sharding);

} // namespace reshard
