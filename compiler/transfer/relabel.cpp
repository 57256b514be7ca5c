// SPDX-License-Identifier: Apache-2.0
// relabel (--relabel-target): permutes the world ranks of each target endpoint so that most bytes are local. It solves
// a maximum-weight assignment of mesh ranks to world ranks; a weight is the number of bytes that the world rank already
// holds of those that the mesh rank needs. The solution is exact, in time O(n^3) (shortest augmenting paths: Jonker
// and Volgenant, "A shortest augmenting path algorithm for dense and sparse linear assignment problems", 1987). Among
// equal assignments, the one that changes the fewest mesh ranks is preferred.

#include "compiler/pass.h"
#include "compiler/transfer/candidates.h"

#include <algorithm>
#include <limits>
#include <map>

namespace reshard {

using namespace ir;

namespace {

constexpr size_t kMaxRanks = 4096;

using Weights = std::vector<std::vector<int64_t>>;

/// Returns a column for each row, a permutation, with the largest sum of weights.
std::vector<size_t> assign(const Weights &weights) {
  const size_t n = weights.size();
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> rowPrice(n), columnPrice(n + 1);
  std::vector<size_t> rowOf(n + 1, kNone), before(n + 1); // by column; paths start at the extra column n
  for (size_t row = 0; row < n; ++row) {
    std::vector<int64_t> distance(n + 1, kFar);
    std::vector<bool> done(n + 1);
    size_t column = n;
    rowOf[n] = row;
    do { // Dijkstra's algorithm over columns, with reduced costs (a cost is a negated weight)
      done[column] = true;
      const size_t at = rowOf[column];
      size_t nearest = kNone;
      for (size_t c = 0; c < n; ++c) {
        if (done[c])
          continue;
        const int64_t reduced = -weights[at][c] - rowPrice[at] - columnPrice[c];
        if (reduced < distance[c]) {
          distance[c] = reduced;
          before[c] = column;
        }
        if (nearest == kNone || distance[c] < distance[nearest])
          nearest = c;
      }
      const int64_t step = distance[nearest];
      for (size_t c = 0; c <= n; ++c) {
        if (done[c]) {
          rowPrice[rowOf[c]] += step;
          columnPrice[c] -= step;
        } else if (distance[c] != kFar) {
          distance[c] -= step;
        }
      }
      column = nearest;
    } while (rowOf[column] != kNone);
    for (; column != n; column = before[column])
      rowOf[column] = rowOf[before[column]];
  }
  std::vector<size_t> columnOf(n);
  for (size_t column = 0; column < n; ++column)
    columnOf[rowOf[column]] = column;
  return columnOf;
}

/// The bytes that each world rank of a target endpoint (columns, ordered as in Endpoint::ranks) holds of those that
/// each of its mesh ranks (rows) needs.
Weights heldBytes(const Module &module, unsigned number) {
  const Endpoint &source = module.layout.endpoints[0], &target = module.layout.endpoints[number];
  std::map<int32_t, size_t> columnOf;
  for (size_t column = 0; column < target.ranks.size(); ++column)
    columnOf[target.ranks[column]] = column;
  Weights weights(target.ranks.size(), std::vector<int64_t>(target.ranks.size()));
  Candidates candidates(module.layout);
  for (const Overlap &overlap : module.transfers.overlaps) {
    if (overlap.endpoint != number || overlap.pattern < 0)
      continue;
    candidates.select(overlap);
    for (int32_t replica : candidates.all())
      if (const auto column = columnOf.find(source.ranks[replica]); column != columnOf.end())
        for (int32_t meshRank : overlap.targets)
          weights[meshRank][column->second] += overlap.bytes * overlap.tensors;
  }
  return weights;
}

} // namespace

llvm::Error relabel(Module &module) {
  Layout &layout = module.layout;
  for (unsigned e = 1; e < layout.endpoints.size(); ++e) {
    Endpoint &target = layout.endpoints[e];
    if (target.storage || layout.endpoints[0].storage)
      continue;
    const size_t n = target.ranks.size();
    if (n > kMaxRanks)
      return llvm::createStringError(target.role + " has " + std::to_string(n) +
                                     " ranks, but --relabel-target supports at most " + std::to_string(kMaxRanks) +
                                     "; compile without --relabel-target");
    Weights weights = heldBytes(module, e);
    int64_t before = 0, largest = 0, after = 0;
    for (size_t meshRank = 0; meshRank < n; ++meshRank) {
      before += weights[meshRank][meshRank];
      largest = std::max(largest, *std::max_element(weights[meshRank].begin(), weights[meshRank].end()));
    }
    if (largest == 0)
      continue;
    // If several assignments are best, choose the one that changes the fewest ranks: scale the weights by n + 1 and add
    // one for each mesh rank that keeps its rank. If that could overflow, use any best assignment.
    Weights scaled = weights;
    if (const auto scale = static_cast<int64_t>(n) + 1;
        largest < std::numeric_limits<int64_t>::max() / 4 / scale / scale)
      for (size_t meshRank = 0; meshRank < n; ++meshRank) {
        for (int64_t &weight : scaled[meshRank])
          weight *= scale;
        ++scaled[meshRank][meshRank];
      }
    const std::vector<size_t> column = assign(scaled);
    std::vector<int32_t> ranks(n);
    for (size_t meshRank = 0; meshRank < n; ++meshRank) {
      ranks[meshRank] = target.ranks[column[meshRank]];
      after += weights[meshRank][column[meshRank]];
    }
    target.ranks = std::move(ranks);
    target.relabeled = after - before;
  }
  return llvm::Error::success();
}

} // namespace reshard
