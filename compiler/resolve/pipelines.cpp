// SPDX-License-Identifier: Apache-2.0
#include "compiler/resolve/pipelines.h"
#include "ir/ir.h"

#include <algorithm>
#include <numeric>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

std::string counted(int64_t n, const char *noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

/// The number of values of each virtual rank under `first` and `last`, or `embedding` and `loss`.
llvm::Expected<std::vector<int64_t>> sizesOf(const Pipeline &p, int64_t n, int64_t ranks) {
  const int64_t v = p.interleave, stages = ranks * v;
  auto fail = [](const std::string &why) { return llvm::createStringError(why); };
  if (p.embedding || p.loss) {
    const int64_t e = p.embedding.value_or(0), l = p.loss.value_or(0);
    if (e < 0 || e > 1 || l < 0 || l > 1)
      return fail("'embedding' and 'loss' are " + std::to_string(e) + " and " + std::to_string(l) +
                  ", expected 0 or 1");
    if ((n + e + l) % stages != 0)
      return fail(counted(n, "value") + " and " + std::to_string(e + l) +
                  " for embedding and loss cannot be divided into " + counted(stages, "stage") + ": " +
                  std::to_string(stages) + " does not divide " + std::to_string(n + e + l));
    std::vector<int64_t> sizes(stages, (n + e + l) / stages);
    sizes.front() -= e;
    sizes.back() -= l;
    if (sizes.front() < 0 || sizes.back() < 0)
      return fail("found " + counted(n, "value") + ", too few for " + counted(stages, "stage") +
                  " with embedding and loss");
    return sizes;
  }
  if (ranks == 1)
    return fail("'first' and 'last' need at least 2 ranks, found 1");
  const int64_t others = ranks - p.first.has_value() - p.last.has_value();
  const int64_t rest = n - p.first.value_or(0) - p.last.value_or(0);
  if (p.first.value_or(0) < 0 || p.last.value_or(0) < 0 || rest < 0)
    return fail("'first' and 'last' are " + std::to_string(n - rest) +
                " values in all, expected each at least 0 and at most " + std::to_string(n) + " in all");
  if (others == 0 ? rest != 0 : rest % others != 0)
    return fail("'first' and 'last' leave " + counted(rest, "value") + ", which cannot be divided evenly over " +
                (others == 1 ? "the other rank" : std::to_string(others) + " other ranks"));
  std::vector<int64_t> each(ranks, others ? rest / others : 0);
  if (p.first)
    each.front() = *p.first;
  if (p.last)
    each.back() = *p.last;
  std::vector<int64_t> sizes;
  for (int64_t chunk = 0; chunk < v; ++chunk)
    for (int64_t rank : each) {
      if (rank % v != 0)
        return fail("a rank has " + counted(rank, "value") + ", expected a multiple of " + std::to_string(v) +
                    " ('interleave')");
      sizes.push_back(rank / v);
    }
  return sizes;
}

} // namespace

llvm::Expected<PipelineShards> applyPipeline(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks) {
  if (pipeline.stages) {
    const int64_t stages = static_cast<int64_t>(pipeline.stages->size());
    if (stages % ranks != 0)
      return llvm::createStringError(counted(stages, "stage") + " over " + std::to_string(ranks) +
                                     " ranks, expected a multiple of " + std::to_string(ranks));
    const int64_t values = std::accumulate(pipeline.stages->begin(), pipeline.stages->end(), int64_t{0});
    if (values != n)
      return llvm::createStringError("'" + pipeline.key + "' has " + counted(values, "value") +
                                     " in all stages, expected " + std::to_string(n));
    pipeline.interleave = stages / ranks;
    scheme.numbers = *pipeline.stages;
    scheme.name = "sizes";
  } else if (pipeline.first || pipeline.last || pipeline.embedding || pipeline.loss) {
    llvm::Expected<std::vector<int64_t>> sizes = sizesOf(pipeline, n, ranks);
    if (!sizes)
      return sizes.takeError();
    scheme.numbers = std::move(*sizes);
    scheme.name = "sizes";
  }
  const int64_t modelChunks = pipeline.interleave;
  llvm::Expected<DimensionShards> stages = applyScheme(scheme, n, ranks * modelChunks, 1);
  if (!stages)
    return stages.takeError();
  PipelineShards result;
  result.modelChunks = modelChunks;
  result.local.resize(ranks);
  for (int64_t stage = 0; stage < ranks * modelChunks; ++stage)
    for (IndexBlock s : dense(stages->at[stage])) {
      s.to += stage / ranks * ir::kModelChunkStride;
      result.local[stage % ranks].push_back(s);
    }
  if (modelChunks == 1) {
    result.shards = std::move(*stages);
    return result;
  }
  result.shards.at.resize(ranks);
  result.shards.lengths.resize(ranks);
  result.shards.repeats.assign(stages->repeats.size(), std::vector<IndexMap>(ranks));
  for (int64_t stage = 0; stage < ranks * modelChunks; ++stage) {
    const int64_t rank = stage % ranks;
    for (size_t layer = 0; layer < stages->layers(); ++layer)
      for (IndexBlock s : stages->layer(layer)[stage]) {
        s.to += result.shards.lengths[rank];
        (layer == 0 ? result.shards.at : result.shards.repeats[layer - 1])[rank].push_back(s);
      }
    result.shards.lengths[rank] += stages->lengths[stage];
  }
  for (IndexMap &local : result.local)
    local = normalize(std::move(local));
  for (size_t layer = 0; layer < result.shards.layers(); ++layer)
    for (IndexMap &indexMap : layer == 0 ? result.shards.at : result.shards.repeats[layer - 1])
      indexMap = normalize(std::move(indexMap));
  return result;
}

} // namespace reshard
