// SPDX-License-Identifier: Apache-2.0
// The sharding schemes: which rank holds which of n rows. compiler/frontend/scheme_table.h lists them. Only schemes.cpp
// distinguishes them.
#pragma once

#include "ir/index_map.h"

#include "llvm/Support/Error.h"

#include <string>
#include <vector>

namespace reshard {

/// A shard rule's scheme with its arguments evaluated.
struct Scheme {
  std::string name = "even";               // a row of schemes.def
  std::vector<int64_t> numbers;            // sizes, blocks: the list; stride, cyclic: one number
  std::vector<std::vector<int64_t>> lists; // map: rows by rank, in slot order
  int64_t unit = 0;                        // 0: not stated
  bool replicate = false;
  std::string noun = "row"; // names a position in messages: "row" of a dimension, "value" of an index variable
};

/// n rows sharded over some ranks.
struct DimensionShards {
  std::vector<ir::IndexMap> at; // by rank: logical -> local position
  std::vector<int64_t> lengths; // by rank: local positions, repeats included
  // [i][rank]: the (i+2)th occurrences of rows that a `map` lists repeatedly
  std::vector<std::vector<ir::IndexMap>> repeats;

  /// The layers: `at`, then each of `repeats`.
  size_t layers() const { return 1 + repeats.size(); }
  const std::vector<ir::IndexMap> &layer(size_t i) const { return i == 0 ? at : repeats[i - 1]; }
};

/// Applies a scheme to n rows over `ranks` ranks, in units of `scheme.unit` rows or, if that is not stated, of
/// `defaultUnit`: the scheme distributes ceil(n / unit) units, of which the last may be short, and never splits one.
/// With `replicate` and more ranks than units, rank r holds unit floor(r * units / ranks). Every row is on some rank,
/// unless a `map` omits it.
llvm::Expected<DimensionShards> applyScheme(const Scheme &scheme, int64_t n, int64_t ranks, int64_t defaultUnit);

/// Whether a scheme's numbers are for one n (sizes, blocks, map): such a scheme cannot shard the entries of a concat
/// separately.
bool hasLists(const Scheme &scheme);

} // namespace reshard
