// SPDX-License-Identifier: Apache-2.0
// Each scheme against a simple implementation of docs/yaml.md, section 5, which lists the rows of each rank.
#include "compiler/resolve/schemes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <sstream>

namespace reshard {
namespace {

using Rows = std::vector<std::vector<int64_t>>; // by rank, in local order

/// The table of docs/yaml.md, on units. Nothing if a requirement of the scheme is not met.
std::optional<Rows> referenceUnits(const Scheme &s, int64_t n, int64_t k) {
  Rows rows(k);
  if (s.replicate && k > n && n > 0) {
    if (k % n != 0)
      return std::nullopt;
    for (int64_t r = 0; r < k; ++r)
      rows[r] = {r * n / k};
    return rows;
  }
  auto range = [&](int64_t r, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      rows[r].push_back(i);
  };
  if (s.name == "map") {
    if (static_cast<int64_t>(s.lists.size()) != k)
      return std::nullopt;
    for (const auto &list : s.lists)
      for (int64_t row : list)
        if (row < 0 || row >= n)
          return std::nullopt;
    return s.lists;
  }
  if (s.name == "sizes" || s.name == "blocks") {
    if (std::any_of(s.numbers.begin(), s.numbers.end(), [](int64_t z) { return z < 0; }) ||
        std::accumulate(s.numbers.begin(), s.numbers.end(), int64_t(0)) != n)
      return std::nullopt;
  }
  if (s.name == "sizes") {
    if (static_cast<int64_t>(s.numbers.size()) != k)
      return std::nullopt;
    int64_t next = 0;
    for (int64_t r = 0; r < k; next += s.numbers[r++])
      range(r, next, next + s.numbers[r]);
    return rows;
  }
  if (s.name == "blocks") {
    int64_t o = 0;
    for (int64_t l : s.numbers) {
      if (l % k != 0)
        return std::nullopt;
      for (int64_t r = 0; r < k; ++r)
        range(r, o + r * l / k, o + (r + 1) * l / k);
      o += l;
    }
    return rows;
  }
  if ((s.name == "even" && n % k != 0) || (s.name == "stride" && n % (k * s.numbers[0]) != 0))
    return std::nullopt;
  for (int64_t i = 0; i < n; ++i) { // the rank of each row
    int64_t r = 0;
    if (s.name == "even")
      r = i / (n / k);
    else if (s.name == "chunk")
      r = i / ((n + k - 1) / k);
    else if (s.name == "balanced") {
      const int64_t q = n / k, m = n % k;
      while (i >= (r + 1) * q + std::min(r + 1, m))
        ++r;
    } else if (s.name == "vllm" || s.name == "sglang") {
      const int64_t q = n / k, after = s.name == "vllm" ? 1 : 0; // ranks behind those with one more row
      for (int64_t next = 0; (next += q + (r < k - after && r >= k - after - n % k)) <= i;)
        ++r;
    } else if (s.name == "round_robin")
      r = i % k;
    else if (s.name == "cyclic")
      r = i / s.numbers[0] % k;
    else if (s.name == "stride")
      r = i / (n / (k * s.numbers[0])) % k;
    rows[r].push_back(i);
  }
  return rows;
}

std::optional<Rows> reference(const Scheme &scheme, int64_t n, int64_t k) {
  const int64_t u = std::max<int64_t>(scheme.unit, 1);
  const auto units = referenceUnits(scheme, (n + u - 1) / u, k);
  if (!units)
    return std::nullopt;
  Rows rows(k);
  for (int64_t r = 0; r < k; ++r)
    for (int64_t unit : (*units)[r])
      for (int64_t i = unit * u; i < std::min((unit + 1) * u, n); ++i)
        rows[r].push_back(i);
  return rows;
}

/// Shards as lists of rows. Fails if a local position has no row or two.
Rows expanded(const DimensionShards &shards) {
  Rows rows;
  for (size_t r = 0; r < shards.at.size(); ++r) {
    std::map<int64_t, int64_t> local;
    for (size_t i = 0; i < shards.layers(); ++i) {
      const ir::IndexMap &layer = shards.layer(i)[r];
      EXPECT_EQ(layer, ir::normalize(layer));
      for (const auto &[row, position] : expand(layer))
        EXPECT_TRUE(local.emplace(position, row).second) << "local position twice";
    }
    EXPECT_EQ(static_cast<int64_t>(local.size()), shards.lengths[r]);
    auto &list = rows.emplace_back();
    for (const auto &[position, row] : local) {
      EXPECT_EQ(position, static_cast<int64_t>(list.size()));
      list.push_back(row);
    }
  }
  return rows;
}

Scheme scheme(std::string name, std::vector<int64_t> numbers = {}, int64_t unit = 0, bool replicate = false) {
  Scheme result;
  result.name = std::move(name);
  result.numbers = std::move(numbers);
  result.unit = unit;
  result.replicate = replicate;
  return result;
}

Rows sharded(const Scheme &s, int64_t n, int64_t k, int64_t defaultUnit = 1) {
  llvm::Expected<DimensionShards> shards = applyScheme(s, n, k, defaultUnit);
  if (shards)
    return expanded(*shards);
  ADD_FAILURE() << toString(shards.takeError());
  return {};
}

std::string errorOf(const Scheme &s, int64_t n, int64_t k) { return toString(applyScheme(s, n, k, 1).takeError()); }

TEST(Schemes, TableOfTheDocumentation) { // docs/yaml.md, section 5
  EXPECT_EQ(sharded(scheme("even"), 8, 4), (Rows{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(sharded(scheme("chunk"), 10, 4), (Rows{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}}));
  EXPECT_EQ(sharded(scheme("chunk"), 5, 4), (Rows{{0, 1}, {2, 3}, {4}, {}}));
  EXPECT_EQ(sharded(scheme("balanced"), 10, 4), (Rows{{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}));
  EXPECT_EQ(sharded(scheme("vllm"), 10, 4), (Rows{{0, 1}, {2, 3, 4}, {5, 6, 7}, {8, 9}}));
  EXPECT_EQ(sharded(scheme("vllm"), 3, 4), (Rows{{0}, {1}, {2}, {}}));
  EXPECT_EQ(sharded(scheme("sglang"), 10, 4), (Rows{{0, 1}, {2, 3}, {4, 5, 6}, {7, 8, 9}}));
  EXPECT_EQ(sharded(scheme("sglang"), 3, 4), (Rows{{}, {0}, {1}, {2}}));
  EXPECT_EQ(sharded(scheme("round_robin"), 10, 4), (Rows{{0, 4, 8}, {1, 5, 9}, {2, 6}, {3, 7}}));
  EXPECT_EQ(sharded(scheme("sizes", {3, 0, 5}), 8, 3), (Rows{{0, 1, 2}, {}, {3, 4, 5, 6, 7}}));
  EXPECT_EQ(sharded(scheme("stride", {2}), 8, 2), (Rows{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(sharded(scheme("cyclic", {2}), 9, 2), (Rows{{0, 1, 4, 5, 8}, {2, 3, 6, 7}}));
  EXPECT_EQ(sharded(scheme("blocks", {4, 2}), 6, 2), (Rows{{0, 1, 4}, {2, 3, 5}}));
  Scheme map = scheme("map");
  map.lists = {{3, 0}, {1, 2}};
  EXPECT_EQ(sharded(map, 4, 2), (Rows{{3, 0}, {1, 2}}));
  EXPECT_EQ(sharded(scheme("even", {}, 2), 7, 2), (Rows{{0, 1, 2, 3}, {4, 5, 6}}));
  EXPECT_EQ(sharded(scheme("chunk", {}, 2), 9, 2), (Rows{{0, 1, 2, 3, 4, 5}, {6, 7, 8}}));
  EXPECT_EQ(sharded(scheme("even", {}, 2, true), 4, 4), (Rows{{0, 1}, {0, 1}, {2, 3}, {2, 3}}));
}

TEST(Schemes, RandomCasesEqualTheReference) {
  std::mt19937_64 random(1);
  auto upTo = [&](int64_t n) { return static_cast<int64_t>(random() % (n + 1)); };
  std::map<std::string, int> checked;
  std::set<std::string> names;
#define SCHEME(name, ...) names.insert(#name);
#include "compiler/frontend/schemes.def"
#undef SCHEME
  for (const std::string &name : names)
    for (int round = 0; round < 2000; ++round) {
      Scheme s = scheme(name);
      const int64_t k = 1 + upTo(8);
      int64_t n = upTo(60);
      s.unit = upTo(2) ? 0 : 1 + upTo(7);
      if (std::set<std::string>{"even", "chunk", "balanced", "vllm", "sglang", "round_robin"}.contains(name))
        s.replicate = upTo(3) == 0;
      const int64_t u = std::max<int64_t>(s.unit, 1);
      if (name == "even" && upTo(3))
        n = n / (k * u) * k * u - (n % 2 ? upTo(u - 1) : 0), n = std::max<int64_t>(n, 0);
      if (name == "cyclic" || name == "stride")
        s.numbers = {1 + upTo(4)};
      if (name == "stride" && upTo(3))
        n = n / (k * u * s.numbers[0]) * k * u * s.numbers[0];
      if (name == "sizes" || name == "blocks") {
        int64_t sum = 0;
        for (int64_t i = 0, count = name == "sizes" ? k : upTo(4); i < count; ++i) {
          s.numbers.push_back(name == "sizes" ? upTo(6) : k * upTo(3));
          sum += s.numbers.back();
        }
        n = std::max<int64_t>(sum * u - upTo(u - 1), 0);
      }
      if (name == "map") {
        const int64_t units = (n + u - 1) / u;
        s.lists.resize(k);
        for (int64_t i = 0, count = units ? upTo(2 * units) : 0; i < count; ++i)
          s.lists[upTo(k - 1)].push_back(upTo(units - 1));
      }
      const auto wanted = reference(s, n, k);
      llvm::Expected<DimensionShards> shards = applyScheme(s, n, k, 1);
      ASSERT_EQ(wanted.has_value(), static_cast<bool>(shards))
          << name << " n " << n << " k " << k << " u " << s.unit << ": " << toString(shards.takeError());
      if (!wanted) {
        consumeError(shards.takeError());
        continue;
      }
      ASSERT_EQ(*wanted, expanded(*shards)) << name << " n " << n << " k " << k << " u " << s.unit;
      ++checked[name];
    }
  for (const std::string &name : names)
    EXPECT_GE(checked[name], 500) << name;
}

TEST(Schemes, PipelineStagesOfTheEngines) { // tables that the engines' functions made (tests/library/stages.py)
  for (const char *engine : {"vllm", "sglang"}) {
    std::ifstream file(std::string(RESHARD_SOURCE_DIR "/tests/library/stages/") + engine + ".txt");
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>
        more; // ranks, rows mod ranks -> by rank: 1 if it has one more row
    for (std::string line; std::getline(file, line);) {
      if (line.empty() || !std::isdigit(static_cast<unsigned char>(line[0])))
        continue;
      std::istringstream numbers(line);
      int64_t ranks = 0, remainder = 0;
      char colon = 0;
      numbers >> ranks >> remainder >> colon;
      auto &each = more[{ranks, remainder}];
      each.assign(std::istream_iterator<int64_t>(numbers), {});
      ASSERT_EQ(static_cast<int64_t>(each.size()), ranks) << line;
    }
    ASSERT_EQ(more.size(), 136u);
    for (int64_t n = 1; n <= 200; ++n)
      for (int64_t k = 1; k <= 16; ++k) {
        Rows wanted;
        for (int64_t r = 0, row = 0; r < k; ++r)
          for (int64_t i = std::ssize(wanted.emplace_back()), size = n / k + more.at({k, n % k})[r]; i < size; ++i)
            wanted.back().push_back(row++);
        ASSERT_EQ(sharded(scheme(engine), n, k), wanted) << engine << " n " << n << " k " << k;
      }
  }
}

TEST(Schemes, AMillionPeriodsAreOneBlock) {
  const int64_t million = 1'000'000;
  for (const auto &[s, n] :
       {std::pair(scheme("round_robin"), 8 * million), std::pair(scheme("cyclic", {4}), 32 * million),
        std::pair(scheme("stride", {million}), 16 * million), std::pair(scheme("cyclic", {2}, 16), 256 * million)}) {
    llvm::Expected<DimensionShards> shards = applyScheme(s, n, 8, 1);
    ASSERT_TRUE(static_cast<bool>(shards)) << toString(shards.takeError());
    for (const ir::IndexMap &indexMap : shards->at) {
      ASSERT_EQ(indexMap.size(), 1u) << s.name;
      EXPECT_EQ(indexMap[0].count, million);
    }
  }
}

TEST(Schemes, DefaultUnit) {
  EXPECT_EQ(sharded(scheme("even"), 8, 2, 4), (Rows{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(sharded(scheme("round_robin"), 8, 3, 2), (Rows{{0, 1, 6, 7}, {2, 3}, {4, 5}}));
  EXPECT_EQ(sharded(scheme("round_robin", {}, 1), 4, 2, 2),
            (Rows{{0, 2}, {1, 3}})); // a stated unit replaces the default
}

TEST(Schemes, RepeatedRowsOfAMapAreLayers) {
  Scheme map = scheme("map", {}, 2); // units of 2 in 5 rows: unit 2 is row 4 only
  map.lists = {{2, 0, 2}, {1}};
  llvm::Expected<DimensionShards> shards = applyScheme(map, 5, 2, 1);
  ASSERT_TRUE(static_cast<bool>(shards)) << toString(shards.takeError());
  EXPECT_EQ(shards->repeats.size(), 1u);
  EXPECT_EQ(expanded(*shards), (Rows{{4, 0, 1, 4}, {2, 3}}));
}

TEST(Schemes, ErrorsStateTheNumbers) {
  EXPECT_EQ(
      errorOf(scheme("even"), 10, 4),
      "'even' cannot shard 10 rows over 4 ranks: 4 does not divide 10 (use 'chunk' or 'balanced' for uneven shards)");
  EXPECT_EQ(errorOf(scheme("even", {}, 128), 640, 4), "'even' cannot shard 5 units of 128 rows over 4 ranks: 4 does "
                                                      "not divide 5 (use 'chunk' or 'balanced' for uneven shards)");
  EXPECT_EQ(errorOf(scheme("even", {}, 128, true), 384, 8),
            "'replicate' cannot shard 3 units of 128 rows over 8 ranks: 3 does not divide 8");
  EXPECT_EQ(errorOf(scheme("sizes", {4, 5}), 10, 2), "'sizes' sum to 9, expected 10 rows");
  EXPECT_EQ(errorOf(scheme("sizes", {4, 5}), 9, 3), "'sizes' lists 2 sizes, expected 3, one for each rank");
  EXPECT_EQ(errorOf(scheme("sizes", {-1, 5}), 4, 2), "'sizes' has -1 for rank 0, expected 0 to 4 rows");
  EXPECT_EQ(errorOf(scheme("stride", {3}), 8, 2),
            "'stride' cannot shard 8 rows over 2 ranks: 2 ranks times stride 3 does not divide 8");
  EXPECT_EQ(errorOf(scheme("blocks", {4, 3}), 7, 2),
            "'blocks' cannot shard a block of 3 over 2 ranks: 2 does not divide 3");
  EXPECT_EQ(errorOf(scheme("blocks", {4}), 6, 2), "'blocks' sum to 4, expected 6 rows");
  EXPECT_EQ(errorOf(scheme("sizes", {1}, 0, true), 1, 4),
            "'replicate' cannot be used with 'sizes', expected even, chunk, balanced, vllm, sglang or round_robin");
  Scheme map = scheme("map");
  map.noun = "value";
  map.lists = {{0, 4}, {1}};
  EXPECT_EQ(errorOf(map, 4, 2), "'map' puts value 4 on rank 0, expected 0 to 3");
  EXPECT_EQ(errorOf(map, 5, 3), "'map' has 2 lists, expected 3, one for each rank");
}

} // namespace
} // namespace reshard
