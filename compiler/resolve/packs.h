// Packs: several tensors in one array. A pack becomes a tree with shapes, which says where in the whole array the rows
// of each tensor stand and how the whole is cut. Dimensions never mix, so each is looked at on its own. Rules:
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
  std::vector<int64_t> permute; // finished dimension i is the tensor's dimension permute[i]; filled in
  // concat, interleave, flat
  int64_t dimension = 0;
  int64_t groups = 1;          // interleave
  std::vector<int64_t> starts; // flat: of each entry
  std::vector<PackTree> of;
  /// Rows in one group of an interleave.
  int64_t groupRows() const { return shape[dimension] / groups; }
};

/// Finds the tensors of a pack and joins their shapes: those of a concat add up along its dimension and agree along the
/// others; of an interleave, each gives rows/groups to every group; entries of a flat buffer follow one another. Empty
/// after errors, which are at the component's place.
std::optional<PackTree> readPack(const Pack &pack, const Tensors &tensors, const Environment &names,
                                 Diagnostics &diagnostics);

/// The tensors of a pack, in order.
std::vector<const PackTree *> leaves(const PackTree &tree);

/// Where the rows of each leaf stand in the whole (uncut) array along dimension d: leaf position -> joined position.
std::vector<ir::IndexMap> joinedIndexMaps(const PackTree &tree, int64_t d);

/// Whether cutting dimension d parts a concat along d into its components: what a pad or lists of sizes cannot go with.
bool splitsComponents(const PackTree &tree, int64_t d);

/// Cuts dimension d, padded to `padded` rows, by a scheme over `ranks` ranks: position in the whole array -> local
/// position. A concat along d is cut component by component and what a rank holds of them joined; an interleave along d
/// is cut as one array, between groups unless the scheme states a unit; along other dimensions the components must be
/// cut alike. `joined`: the whole is cut as one array, whatever it is. Empty after an error, whose text is in `error`.
std::optional<DimensionShards> shardDimension(const PackTree &tree, int64_t d, int64_t padded, const Scheme &scheme,
                                              int64_t ranks, bool joined, std::string &error);

} // namespace reshard
