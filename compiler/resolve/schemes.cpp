// SPDX-License-Identifier: Apache-2.0
// One function for each scheme, on units; applyScheme adds `unit` and `replicate`. Regular schemes make one periodic
// block for each rank, whatever n is. The formulas are in docs/yaml.md, section 5. The comment of a scheme that an
// engine defines names the engine's function.

#include "compiler/resolve/schemes.h"
#include "compiler/frontend/scheme_table.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

/// "1 row", "3 units of 128 rows".
std::string counted(int64_t n, const std::string &noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

/// The argument of a scheme function: n units over k ranks. The function fills `at`, which has k empty maps.
struct Problem {
  const Scheme &scheme;
  int64_t n, k;
  std::string units; // "10 rows" or "5 units of 128 rows", for messages
  std::vector<IndexMap> &at;
  std::vector<std::vector<IndexMap>> &repeats;

  std::string over() const { return units + " over " + counted(k, "rank"); }
  /// Appends a block to the index map of a rank unless it is empty.
  void put(int64_t rank, IndexBlock block) const {
    if (block.length <= 0 || block.count <= 0)
      return;
    if (block.count == 1)
      block.fromStep = block.toStep = 0;
    at[rank].push_back(block);
  }
};

namespace schemes {

/// Rows [r·n/k, (r+1)·n/k); k must divide n.
llvm::Error even(const Problem &p) {
  if (p.n % p.k != 0)
    return llvm::createStringError("'even' cannot shard " + p.over() + ": " + std::to_string(p.k) +
                                   " does not divide " + std::to_string(p.n) +
                                   " (use 'chunk' or 'balanced' for uneven shards)");
  for (int64_t r = 0, each = p.n / p.k; r < p.k; ++r)
    p.put(r, {r * each, 0, each});
  return llvm::Error::success();
}

/// c = ceil(n/k): rows [r·c, min((r+1)·c, n)), the last ranks short or empty (torch.chunk, FSDP2).
llvm::Error chunk(const Problem &p) {
  for (int64_t r = 0, c = (p.n + p.k - 1) / p.k; r < p.k; ++r)
    p.put(r, {r * c, 0, std::min((r + 1) * c, p.n) - r * c});
  return llvm::Error::success();
}

/// Consecutive rows, one more for each of the n mod k ranks from `first` on.
llvm::Error remainderFrom(const Problem &p, int64_t first) {
  for (int64_t r = 0, each = p.n / p.k, more = p.n % p.k; r < p.k; ++r) {
    const int64_t before = std::clamp<int64_t>(r - first, 0, more); // ranks below r with one more
    p.put(r, {r * each + before, 0, each + (r >= first && before < more)});
  }
  return llvm::Error::success();
}

/// The first n mod k ranks hold one row more (vLLM's determine_expert_map).
llvm::Error balanced(const Problem &p) { return remainderFrom(p, 0); }

/// The n mod k ranks right before the last hold one row more (vLLM's get_pp_indices, vllm/distributed/utils.py).
llvm::Error vllm(const Problem &p) { return remainderFrom(p, p.k - 1 - p.n % p.k); }

/// The last n mod k ranks hold one row more (SGLang's get_pp_indices, sglang/srt/distributed/utils.py).
llvm::Error sglang(const Problem &p) { return remainderFrom(p, p.k - p.n % p.k); }

/// Blocks of b rows, block i on rank i mod k, the last possibly short (ScaLAPACK's block-cyclic distribution).
llvm::Error blockCyclic(const Problem &p, int64_t b) {
  if (b >= p.n) {
    p.put(0, {0, 0, p.n});
    return llvm::Error::success();
  }
  const int64_t whole = p.n / b, rest = p.n % b; // b < n, so that k·b below cannot overflow where it is used
  for (int64_t r = 0; r < p.k && r <= whole; ++r) {
    const int64_t count = (whole - r + p.k - 1) / p.k;
    p.put(r, {r * b, 0, b, count, count > 1 ? p.k * b : 0, b});
    if (rest > 0 && whole % p.k == r)
      p.put(r, {whole * b, count * b, rest});
  }
  return llvm::Error::success();
}

/// Rows r, r+k, r+2k, …
llvm::Error round_robin(const Problem &p) { return blockCyclic(p, 1); }

llvm::Error cyclic(const Problem &p) {
  if (p.scheme.numbers.size() != 1 || p.scheme.numbers[0] < 1)
    return llvm::createStringError("'cyclic' needs one block length of at least 1");
  return blockCyclic(p, p.scheme.numbers[0]);
}

/// A stated number of rows for each rank, in rank order; zero is allowed.
llvm::Error sizes(const Problem &p) {
  const std::vector<int64_t> &list = p.scheme.numbers;
  if (static_cast<int64_t>(list.size()) != p.k)
    return llvm::createStringError("'sizes' lists " + counted(static_cast<int64_t>(list.size()), "size") +
                                   ", expected " + std::to_string(p.k) + ", one for each rank");
  int64_t next = 0;
  for (int64_t r = 0; r < p.k; ++r) {
    if (list[r] < 0 || list[r] > p.n)
      return llvm::createStringError("'sizes' has " + std::to_string(list[r]) + " for rank " + std::to_string(r) +
                                     ", expected 0 to " + p.units);
    p.put(r, {next, 0, list[r]});
    next += list[r];
    if (next > p.n)
      break;
  }
  if (next == p.n)
    return llvm::Error::success();
  const auto sum = std::accumulate(list.begin(), list.end(), static_cast<__int128>(0));
  return llvm::createStringError("'sizes' sum to " +
                                 (sum > INT64_MAX ? "more than 2^63" : std::to_string(static_cast<int64_t>(sum))) +
                                 ", expected " + p.units);
}

/// k·s equal segments; rank r holds segments r, r+k, … (Megatron-Core's partition_stride,
/// _initialize_affine_weight_cpu in tensor_parallel/layers.py).
llvm::Error stride(const Problem &p) {
  if (p.scheme.numbers.size() != 1 || p.scheme.numbers[0] < 1)
    return llvm::createStringError("'stride' needs one number of at least 1, the segments of each rank");
  const int64_t s = p.scheme.numbers[0];
  if (s > p.n / p.k || p.n % (p.k * s) != 0) {
    if (p.n == 0)
      return llvm::Error::success();
    return llvm::createStringError("'stride' cannot shard " + p.over() + ": " + std::to_string(p.k) +
                                   " ranks times stride " + std::to_string(s) + " does not divide " +
                                   std::to_string(p.n));
  }
  for (int64_t r = 0, length = p.n / (p.k * s); r < p.k; ++r)
    p.put(r, {r * length, 0, length, s, p.k * length, length});
  return llvm::Error::success();
}

/// Global lengths of blocks, each sharded evenly, joined on each rank (Megatron-Core's partition_sizes, times k).
llvm::Error blocks(const Problem &p) {
  int64_t start = 0, local = 0;
  for (int64_t length : p.scheme.numbers) {
    if (length < 0 || length > p.n - start)
      return llvm::createStringError("'blocks' has the block length " + std::to_string(length) + ", expected 0 to " +
                                     std::to_string(p.n - start) + " of " + p.units);
    if (length % p.k != 0)
      return llvm::createStringError("'blocks' cannot shard a block of " + std::to_string(length) + " over " +
                                     counted(p.k, "rank") + ": " + std::to_string(p.k) + " does not divide " +
                                     std::to_string(length));
    const int64_t each = length / p.k;
    for (int64_t r = 0; r < p.k; ++r)
      p.put(r, {start + r * each, local, each});
    start += length;
    local += each;
  }
  if (start == p.n)
    return llvm::Error::success();
  return llvm::createStringError("'blocks' sum to " + std::to_string(start) + ", expected " + p.units);
}

/// Explicit lists of rows for each rank, in slot order (vLLM's expert load balancer). A row that a rank lists again is
/// in `repeats`.
llvm::Error map(const Problem &p) {
  const auto &lists = p.scheme.lists;
  if (static_cast<int64_t>(lists.size()) != p.k)
    return llvm::createStringError("'map' has " + counted(static_cast<int64_t>(lists.size()), "list") + ", expected " +
                                   std::to_string(p.k) + ", one for each rank");
  for (int64_t r = 0; r < p.k; ++r) {
    std::map<int64_t, size_t> seen;
    for (size_t slot = 0; slot < lists[r].size(); ++slot) {
      const int64_t row = lists[r][slot];
      if (row < 0 || row >= p.n)
        return llvm::createStringError("'map' puts " + p.scheme.noun + " " + std::to_string(row) + " on rank " +
                                       std::to_string(r) + ", expected 0 to " + std::to_string(p.n - 1));
      const size_t layer = seen[row]++;
      if (layer > p.repeats.size()) {
        constexpr int64_t kMaxLists = 1 << 22; // layers of repeats times ranks
        if (static_cast<int64_t>(layer) * p.k > kMaxLists)
          return llvm::createStringError("'map' lists " + p.scheme.noun + " " + std::to_string(row) + " of rank " +
                                         std::to_string(r) + " " + std::to_string(layer + 1) +
                                         " times, expected at most " + std::to_string(kMaxLists / p.k + 1) + " times");
        p.repeats.emplace_back(p.k);
      }
      (layer == 0 ? p.at : p.repeats[layer - 1])[r].push_back({row, static_cast<int64_t>(slot), 1, 1, 0, 0});
    }
  }
  return llvm::Error::success();
}

} // namespace schemes

using SchemeFunction = llvm::Error (*)(const Problem &);
#define SCHEME(name, ...) schemes::name,
constexpr SchemeFunction kFunctions[] = {
// one for each row of kSchemes
#include "compiler/frontend/schemes.def"
};
#undef SCHEME

/// Converts units to rows. The last unit has `last` rows, which may be fewer than `unit`: local positions behind it
/// move forward.
void toRows(DimensionShards &shards, int64_t units, int64_t unit, int64_t last) {
  for (size_t r = 0; r < shards.at.size(); ++r) {
    std::vector<int64_t> shortSlots; // local units that are the last unit
    for (size_t i = 0; i < shards.layers(); ++i) {
      IndexMap &layer = i == 0 ? shards.at[r] : shards.repeats[i - 1][r];
      if (last < unit)
        if (const int64_t slot = ir::map(layer, units - 1); slot >= 0)
          shortSlots.push_back(slot);
      for (IndexBlock &s : layer)
        for (int64_t *field : {&s.from, &s.to, &s.length, &s.fromStep, &s.toStep})
          *field *= unit;
      for (IndexBlock &s : layer)
        if (s.count > 1 && s.fromStep == s.length && s.toStep == s.length)
          s = {s.from, s.to, s.length * s.count, 1, 0, 0};
    }
    const int64_t whole = shards.lengths[r] * unit;
    shards.lengths[r] = whole - static_cast<int64_t>(shortSlots.size()) * (unit - last);
    if (shortSlots.empty())
      continue;
    std::sort(shortSlots.begin(), shortSlots.end());
    IndexMap squeeze; // the rank's positions with whole units -> with short ones
    int64_t begin = 0, gone = 0;
    for (int64_t slot : shortSlots) {
      squeeze.push_back({begin, begin - gone, slot * unit + last - begin, 1, 0, 0});
      begin = (slot + 1) * unit;
      gone += unit - last;
    }
    if (begin < whole)
      squeeze.push_back({begin, begin - gone, whole - begin, 1, 0, 0});
    shards.at[r] = compose(shards.at[r], squeeze);
    for (std::vector<IndexMap> &layer : shards.repeats)
      layer[r] = compose(layer[r], squeeze);
  }
}

} // namespace

bool hasLists(const Scheme &scheme) {
  const SchemeRow *row = findScheme(scheme.name);
  return row && (row->argument == SchemeArgument::numbers || row->argument == SchemeArgument::lists);
}

llvm::Expected<DimensionShards> applyScheme(const Scheme &scheme, int64_t n, int64_t ranks, int64_t defaultUnit) {
  const SchemeRow *row = findScheme(scheme.name);
  if (!row)
    return llvm::createStringError("unknown scheme '" + scheme.name + "'");
  if (scheme.replicate && !row->replicates)
    return llvm::createStringError("'replicate' cannot be used with '" + scheme.name + "', expected " +
                                   schemesWith(&SchemeRow::replicates));
  const int64_t unit = std::min(scheme.unit > 0 ? scheme.unit : defaultUnit, std::max<int64_t>(n, 1));
  const int64_t units = n / unit + (n % unit != 0);
  const std::string unitText =
      unit == 1 ? counted(units, scheme.noun) : counted(units, "unit") + " of " + counted(unit, scheme.noun);
  DimensionShards shards;
  shards.at.resize(ranks);

  if (scheme.replicate && ranks > units && units > 0) {
    if (ranks % units != 0)
      return llvm::createStringError("'replicate' cannot shard " + unitText + " over " + counted(ranks, "rank") + ": " +
                                     std::to_string(units) + " does not divide " + std::to_string(ranks));
    for (int64_t r = 0; r < ranks; ++r)
      shards.at[r] = {{r / (ranks / units), 0, 1, 1, 0, 0}};
  } else {
    if (llvm::Error error = kFunctions[row - kSchemes]({scheme, units, ranks, unitText, shards.at, shards.repeats}))
      return error;
  }
  for (IndexMap &indexMap : shards.at)
    if (indexMap.size() > 1 || (!indexMap.empty() && indexMap[0].count > 1)) // a single block is in normal form
      indexMap = normalize(std::move(indexMap));
  for (std::vector<IndexMap> &layer : shards.repeats)
    for (IndexMap &indexMap : layer)
      indexMap = normalize(std::move(indexMap));
  shards.lengths.resize(ranks);
  for (int64_t r = 0; r < ranks; ++r)
    for (size_t i = 0; i < shards.layers(); ++i)
      shards.lengths[r] += positionCount(shards.layer(i)[r]);
  if (unit > 1)
    toRows(shards, units, unit, n - (units - 1) * unit);
  return shards;
}

} // namespace reshard
