// SPDX-License-Identifier: Apache-2.0
// Random packs of packs against a simple implementation of docs/yaml.md, section 6, which lists positions one by one.
#include "compiler/resolve/packs.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace reshard {
namespace {

using List = std::vector<int64_t>;
using Kind = Pack::Kind;

std::mt19937_64 random(7);
int64_t upTo(int64_t n) { return static_cast<int64_t>(random() % (n + 1)); }

/// A random pack of two dimensions whose lengths are multiples of `unit` (and, along `fixed`, exactly `length`).
PackTree randomPack(int depth, int fixed, int64_t length) {
  PackTree tree;
  if (depth == 0 || upTo(3) == 0) {
    tree.shape = {4 * upTo(3), 4 * upTo(3)};
    if (fixed >= 0)
      tree.shape[fixed] = length;
    return tree;
  }
  tree.kind = upTo(1) ? Kind::concat : Kind::interleave;
  tree.dimension = fixed >= 0 ? 1 - fixed : upTo(1);
  tree.groups = tree.kind == Kind::interleave ? 1 << upTo(2) : 1;
  const int other = static_cast<int>(1 - tree.dimension);
  const int64_t otherLength = fixed >= 0 ? length : 4 * (1 + upTo(2));
  tree.shape = {0, 0};
  tree.shape[other] = otherLength;
  for (int64_t i = 0, count = 1 + upTo(2); i < count; ++i) {
    tree.of.push_back(randomPack(depth - 1, other, otherLength));
    tree.shape[tree.dimension] += tree.of.back().shape[tree.dimension];
  }
  return tree;
}

/// The leaf and its row at each position along d. `leaf` is the number of the first leaf, then of the next one.
using Where = std::vector<std::pair<int, int64_t>>;
Where rows(const PackTree &tree, int64_t d, int64_t p, int &leaf) {
  // Where packs join along the other dimension, a position along d has rows of several leaves: take the p-th of them.
  if (tree.kind == Kind::tensor) {
    Where result;
    for (int64_t i = 0; i < tree.shape[d]; ++i)
      result.push_back({leaf, i});
    ++leaf;
    return result;
  }
  std::vector<Where> parts;
  for (const PackTree &entry : tree.of)
    parts.push_back(rows(entry, d, p, leaf));
  if (tree.dimension != d)
    return parts[p % parts.size()];
  Where result;
  for (int64_t g = 0; g < tree.groups; ++g)
    for (const Where &part : parts) {
      const int64_t w = static_cast<int64_t>(part.size()) / tree.groups;
      result.insert(result.end(), part.begin() + g * w, part.begin() + (g + 1) * w);
    }
  return result;
}

/// cut(pack, d, n) of docs/yaml.md for one rank. Nothing if it is an error.
std::optional<List> referenceCut(const PackTree &tree, int64_t d, int64_t n, const Scheme &scheme, int64_t k, int64_t r,
                                 bool joined) {
  auto schemeOf = [&](int64_t unit) -> std::optional<List> {
    llvm::Expected<DimensionShards> shards = applyScheme(scheme, n, k, unit);
    if (!shards) {
      consumeError(shards.takeError());
      return std::nullopt;
    }
    List list(shards->lengths[r]);
    for (const auto &[row, local] : expand(shards->at[r]))
      list[local] = row;
    return list;
  };
  if (tree.kind == Kind::interleave && tree.dimension == d)
    return schemeOf(std::max<int64_t>(tree.shape[d] / tree.groups, 1));
  if (joined || tree.kind == Kind::tensor)
    return schemeOf(1);
  std::optional<List> result;
  int64_t offset = 0;
  for (const PackTree &entry : tree.of) {
    auto list = referenceCut(entry, d, tree.dimension == d ? entry.shape[d] : n, scheme, k, r, false);
    if (!list)
      return std::nullopt;
    if (tree.dimension != d) {
      if (result && *result != *list)
        return std::nullopt;
      result = list;
      continue;
    }
    result = result ? result : List();
    for (int64_t p : *list)
      result->push_back(offset + p);
    offset += entry.shape[d];
  }
  return result;
}

int leafCount(const PackTree &tree) {
  int count = tree.kind == Kind::tensor;
  for (const PackTree &entry : tree.of)
    count += leafCount(entry);
  return count;
}

TEST(Packs, RandomPacksEqualTheReference) {
  int sharded = 0, nested = 0;
  for (int round = 0; round < 6000; ++round) {
    const PackTree tree = randomPack(3, -1, 0);
    for (int64_t d = 0; d < 2; ++d) {
      // positions of the leaves' rows in the joined array
      const auto indexMaps = joinedIndexMaps(tree, d);
      ASSERT_EQ(static_cast<int>(indexMaps.size()), leafCount(tree));
      for (int64_t choice = 0; choice < 3; ++choice) {
        int leaf = 0;
        const Where where = rows(tree, d, choice, leaf);
        ASSERT_EQ(static_cast<int64_t>(where.size()), tree.shape[d]);
        for (size_t p = 0; p < where.size(); ++p)
          ASSERT_EQ(map(indexMaps[where[p].first], where[p].second), static_cast<int64_t>(p));
      }
      // positions of each rank
      Scheme scheme;
      scheme.name = std::vector<std::string>{"even",   "chunk",       "balanced", "vllm",
                                             "sglang", "round_robin", "cyclic",   "stride"}[upTo(7)];
      if (scheme.name == "cyclic" || scheme.name == "stride")
        scheme.numbers = {1 + upTo(2)};
      scheme.unit = upTo(3) == 0 ? 1 + upTo(3) : 0;
      const int64_t k = 1 + upTo(3);
      const bool joined = upTo(2) == 0;
      const int64_t padded = splitsEntries(tree, d) && !joined ? tree.shape[d] : tree.shape[d] + upTo(3);
      llvm::Expected<DimensionShards> shards =
          shardDimension(tree, {.d = d, .padded = padded, .scheme = scheme, .ranks = k, .joined = joined});
      const std::string error = shards ? "" : toString(shards.takeError());
      for (int64_t r = 0; r < k; ++r) {
        const auto list = referenceCut(tree, d, padded, scheme, k, r, joined);
        if (!list)
          continue;
        if (!error.empty()) // an error of another rank's shard
          break;
        ASSERT_EQ(static_cast<int64_t>(list->size()), shards->lengths[r]);
        ASSERT_EQ(static_cast<int64_t>(list->size()), positionCount(shards->at[r]));
        for (size_t local = 0; local < list->size(); ++local)
          ASSERT_EQ(map(shards->at[r], (*list)[local]), static_cast<int64_t>(local));
        ++sharded;
        nested += leafCount(tree) > 2;
      }
      if (!error.empty()) {
        bool wrong = false;
        for (int64_t r = 0; r < k; ++r)
          wrong = wrong || !referenceCut(tree, d, padded, scheme, k, r, joined);
        ASSERT_TRUE(wrong) << error;
      }
    }
  }
  EXPECT_GE(sharded, 8000);
  EXPECT_GE(nested, 2000);
}

TEST(Packs, AMillionGroupsStayPeriodic) { // q q k v, a million times over 8 ranks
  PackTree q, k, v, pack;
  const int64_t million = 1'000'000;
  q.shape = {2 * million};
  k.shape = v.shape = {million};
  pack.kind = Kind::interleave;
  pack.groups = million;
  pack.shape = {4 * million};
  pack.of = {q, k, v};
  const Scheme even;
  llvm::Expected<DimensionShards> shards =
      shardDimension(pack, {.d = 0, .padded = 4 * million, .scheme = even, .ranks = 8});
  ASSERT_TRUE(static_cast<bool>(shards)) << toString(shards.takeError());
  const auto indexMaps = joinedIndexMaps(pack, 0);
  const ir::IndexMap third = compose(indexMaps[0], shards->at[3]);
  // q's rows of rank 3: 2 of every 4 local rows, 125,000 times
  EXPECT_EQ(third, (ir::IndexMap{{3 * 250'000, 0, 2, 125'000, 2, 4}}));
}

} // namespace
} // namespace reshard
