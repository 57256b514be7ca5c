// SPDX-License-Identifier: Apache-2.0
// Assigns the rows of the joined array to the entries of a pack, and cuts the sharding of the array at their
// boundaries.
#include "compiler/resolve/packs.h"

#include <algorithm>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

std::string dimensionsText(int64_t count) {
  return std::to_string(count) + (count == 1 ? " dimension" : " dimensions");
}

std::string describe(const PackTree &tree, const Tensors &tensors) {
  const std::string shape = " of shape " + shapeText(tree.shape);
  switch (tree.kind) {
  case Pack::Kind::tensor:
    return "tensor '" + tensors.name(tree.tensor) + "'" + shape;
  case Pack::Kind::concat:
    return "concat" + shape;
  case Pack::Kind::interleave:
    return "interleave" + shape;
  case Pack::Kind::flat:
    return "flat buffer" + shape;
  case Pack::Kind::pieces:
    return "pieces" + shape;
  }
  return {};
}

bool readTensor(const Pack &pack, const Tensors &tensors, PackTree &tree, Diagnostics &diagnostics) {
  const auto tensor = tensors.find(pack.tensor, pack.at, diagnostics);
  if (!tensor)
    return false;
  tree.tensor = *tensor;
  const std::vector<int64_t> &shape = tensors.patternOf(*tensor).shape;
  const int64_t rank = static_cast<int64_t>(shape.size());
  tree.permute = pack.permute;
  if (tree.permute.empty())
    for (int64_t d = 0; d < rank; ++d)
      tree.permute.push_back(d);
  std::vector<int64_t> order = tree.permute;
  std::sort(order.begin(), order.end());
  bool each = static_cast<int64_t>(order.size()) == rank;
  for (int64_t d = 0; d < rank && each; ++d)
    each = order[d] == d;
  if (!each) {
    diagnostics.error(pack.at, "'permute' " + shapeText(tree.permute) + " does not list each dimension of tensor '" +
                                   tensors.name(*tensor) + "' of shape " + shapeText(shape) + " once");
    return false;
  }
  for (int64_t d : tree.permute)
    tree.shape.push_back(shape[d]);
  return true;
}

/// Joins the shapes of a entries of a concat or interleave.
bool joinShapes(const Pack &pack, const Tensors &tensors, PackTree &tree, Diagnostics &diagnostics) {
  const char *kind = tree.kind == Pack::Kind::concat ? "concat" : "interleave";
  const PackTree &first = tree.of[0];
  const int64_t rank = static_cast<int64_t>(first.shape.size());
  if (tree.dimension < 0 || tree.dimension >= rank) {
    diagnostics.error(pack.at, std::string(kind) + " along dimension " + std::to_string(tree.dimension) + ", but " +
                                   describe(first, tensors) + " has " + dimensionsText(rank));
    return false;
  }
  bool ok = true;
  tree.shape = first.shape;
  int64_t total = 0;
  for (const PackTree &entry : tree.of) {
    auto refuse = [&](const std::string &why) {
      diagnostics.error(entry.at, describe(entry, tensors) + " cannot be joined with " + describe(first, tensors) +
                                      " along dimension " + std::to_string(tree.dimension) + ": " + why);
      ok = false;
    };
    if (entry.shape.size() != first.shape.size()) {
      refuse("it has " + dimensionsText(entry.shape.size()) + ", expected " + std::to_string(rank));
      continue;
    }
    for (int64_t d = 0; d < rank; ++d)
      if (d != tree.dimension && entry.shape[d] != first.shape[d])
        refuse("dimension " + std::to_string(d) + " is " + std::to_string(entry.shape[d]) + ", expected " +
               std::to_string(first.shape[d]));
    if (tree.kind == Pack::Kind::interleave && entry.shape[tree.dimension] % tree.groups != 0) {
      diagnostics.error(entry.at, describe(entry, tensors) + " cannot be interleaved in " +
                                      std::to_string(tree.groups) + " groups: " + std::to_string(tree.groups) +
                                      " does not divide " + std::to_string(entry.shape[tree.dimension]) +
                                      ", its dimension " + std::to_string(tree.dimension));
      ok = false;
    }
    total += entry.shape[tree.dimension];
    if (total > kMaxRows) {
      refuse("the pack would have more than 2^60 rows");
      return false;
    }
  }
  tree.shape[tree.dimension] = total;
  return ok;
}

/// Checks that the tensors of pieces have equal numbers of dimensions, which are the param's without a stack.
bool alike(const Tensors &tensors, PackTree &tree, Diagnostics &diagnostics) {
  tree.shape = tree.of[0].shape;
  bool ok = true;
  for (const PackTree &entry : tree.of)
    if (entry.shape.size() != tree.shape.size()) {
      diagnostics.error(entry.at, describe(entry, tensors) + " has " + dimensionsText(entry.shape.size()) +
                                      ", expected " + std::to_string(tree.shape.size()) + " as " +
                                      describe(tree.of[0], tensors) + " of the same param");
      ok = false;
    }
  return ok;
}

/// Assigns the entries of a flat buffer their first elements, which are multiples of `align`.
bool layOut(const Tensors &tensors, int64_t align, PackTree &tree, Diagnostics &diagnostics) {
  int64_t next = 0;
  for (const PackTree &entry : tree.of) {
    int64_t size = 1;
    if (entry.shape.empty()) {
      diagnostics.error(entry.at, describe(entry, tensors) +
                                      " is a scalar, which a flat buffer cannot hold, expected a " +
                                      "tensor of at least one dimension");
      return false;
    }
    bool fits = align - 1 <= kMaxRows - next;
    next = fits ? (next + align - 1) / align * align : next;
    for (int64_t length : entry.shape)
      fits = fits && !__builtin_mul_overflow(size, length, &size);
    if (!fits || size > kMaxRows - next) {
      diagnostics.error(entry.at, "the flat buffer has more than 2^60 elements with " + describe(entry, tensors));
      return false;
    }
    tree.starts.push_back(next);
    next += size;
  }
  tree.shape = {next};
  return true;
}

void collect(const PackTree &tree, std::vector<const PackTree *> &result) {
  if (tree.kind == Pack::Kind::tensor)
    result.push_back(&tree);
  for (const PackTree &entry : tree.of)
    collect(entry, result);
}

/// Appends the shards of a concat's entry, whose rows begin at `offset` of the joined array, to the shards of the
/// entries before it.
void append(DimensionShards &whole, const DimensionShards &entry, int64_t offset) {
  if (whole.at.empty()) {
    whole.at.resize(entry.at.size());
    whole.lengths.resize(entry.at.size());
  }
  for (size_t r = 0; r < entry.at.size(); ++r) {
    for (IndexBlock s : entry.at[r]) {
      s.from += offset;
      s.to += whole.lengths[r];
      whole.at[r].push_back(s);
    }
    whole.lengths[r] += entry.lengths[r];
  }
}

} // namespace

std::optional<PackTree> readPack(const Pack &pack, const Tensors &tensors, const Environment &names,
                                 Diagnostics &diagnostics) {
  PackTree tree;
  tree.kind = pack.kind;
  tree.at = pack.at;
  tree.dimension = pack.dimension;
  if (pack.kind == Pack::Kind::tensor)
    return readTensor(pack, tensors, tree, diagnostics) ? std::optional(std::move(tree)) : std::nullopt;

  bool ok = true;
  for (const Pack &entry : pack.of) {
    if (auto read = readPack(entry, tensors, names, diagnostics))
      tree.of.push_back(std::move(*read));
    else
      ok = false;
  }
  if (pack.groups) {
    const auto groups = evaluate(*pack.groups, names, diagnostics);
    if (groups && *groups < 1)
      diagnostics.error(pack.groups->at, "'groups' is " + std::to_string(*groups) + ", expected at least 1");
    ok = ok && groups && *groups >= 1;
    tree.groups = groups.value_or(1);
  }
  int64_t align = 1;
  if (pack.align) {
    const auto read = evaluate(*pack.align, names, diagnostics);
    if (read && *read < 1)
      diagnostics.error(pack.align->at, "'align' is " + std::to_string(*read) + ", expected at least 1");
    ok = ok && read && *read >= 1;
    align = read.value_or(1);
  }
  if (ok && tree.of.empty()) {
    diagnostics.error(pack.at, "the pack has no tensors, expected at least one");
    ok = false;
  }
  if (!ok || !(tree.kind == Pack::Kind::flat     ? layOut(tensors, align, tree, diagnostics)
               : tree.kind == Pack::Kind::pieces ? alike(tensors, tree, diagnostics)
                                                 : joinShapes(pack, tensors, tree, diagnostics)))
    return std::nullopt;
  return tree;
}

std::vector<const PackTree *> leaves(const PackTree &tree) {
  std::vector<const PackTree *> result;
  collect(tree, result);
  return result;
}

std::vector<IndexMap> joinedIndexMaps(const PackTree &tree, int64_t d) {
  if (tree.kind == Pack::Kind::tensor)
    return {ir::identity(tree.shape[d])};
  std::vector<IndexMap> result;
  int64_t offset = 0; // where the entry begins in the joined array, or in a group
  for (const PackTree &entry : tree.of) {
    // Row i of an interleaved entry with w rows in each group is joined row (i / w) * groupRows + offset + i % w.
    const int64_t rows = entry.shape[d], width = rows / tree.groups;
    for (IndexMap &relation : joinedIndexMaps(entry, d)) {
      if (tree.dimension == d && tree.kind == Pack::Kind::concat)
        for (IndexBlock &s : relation)
          s.to += offset;
      else if (tree.dimension == d && rows > 0)
        relation = compose(relation, ir::normalize({{0, offset, width, tree.groups, width, tree.groupRows()}}));
      result.push_back(std::move(relation));
    }
    if (tree.dimension == d)
      offset += tree.kind == Pack::Kind::concat ? rows : width;
  }
  return result;
}

bool splitsEntries(const PackTree &tree, int64_t d) {
  if (tree.kind == Pack::Kind::tensor || tree.kind == Pack::Kind::flat ||
      (tree.kind == Pack::Kind::interleave && tree.dimension == d))
    return false;
  return tree.dimension == d ||
         std::any_of(tree.of.begin(), tree.of.end(), [&](const PackTree &entry) { return splitsEntries(entry, d); });
}

llvm::Expected<DimensionShards> shardDimension(const PackTree &tree, const DimensionSharding &sharding) {
  const int64_t d = sharding.d;
  const bool along = tree.kind != Pack::Kind::tensor && tree.dimension == d;
  if (along && tree.kind == Pack::Kind::interleave)
    return applyScheme(sharding.scheme, sharding.padded, sharding.ranks, std::max<int64_t>(tree.groupRows(), 1));
  if (sharding.joined || tree.kind == Pack::Kind::tensor || tree.kind == Pack::Kind::flat)
    return applyScheme(sharding.scheme, sharding.padded, sharding.ranks, 1);

  std::optional<DimensionShards> whole;
  int64_t offset = 0;
  for (const PackTree &entry : tree.of) {
    llvm::Expected<DimensionShards> shards = shardDimension(entry, {.d = d,
                                                                    .padded = along ? entry.shape[d] : sharding.padded,
                                                                    .scheme = sharding.scheme,
                                                                    .ranks = sharding.ranks});
    if (!shards)
      return shards.takeError();
    if (along) {
      append(whole ? *whole : whole.emplace(), *shards, offset);
      offset += entry.shape[d];
    } else if (!whole) {
      whole = std::move(*shards);
    } else if (shards->at != whole->at || shards->repeats != whole->repeats) {
      return llvm::createStringError("the entries along dimension " + std::to_string(tree.dimension) +
                                     " are sharded differently along dimension " + std::to_string(d) +
                                     ", expected the same sharding; 'cut: joined' shards them as one array");
    }
  }
  if (along)
    for (IndexMap &indexMap : whole->at)
      indexMap = normalize(std::move(indexMap));
  return std::move(*whole);
}

} // namespace reshard
